"""Reads the text of documents in other formats, in processes with limits."""
