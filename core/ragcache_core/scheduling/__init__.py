"""Which questions are admitted, and which of those that wait comes first."""
