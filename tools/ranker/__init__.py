"""Training of the bundled ranker."""
