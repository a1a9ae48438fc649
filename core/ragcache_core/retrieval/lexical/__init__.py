"""The terms of texts and questions, and which of them find chunks."""
