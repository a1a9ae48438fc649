"""Turns a question into ranked chunks, from the legs of a search."""
