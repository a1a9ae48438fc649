"""Words of questions: which of them find chunks, and where they are in texts."""
