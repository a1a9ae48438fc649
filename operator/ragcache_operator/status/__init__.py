"""What is observed of a RagCache, as conditions: pure functions from objects to status."""
