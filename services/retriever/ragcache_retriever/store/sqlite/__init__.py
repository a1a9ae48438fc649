"""Documents in one SQLite file."""
