"""Keeps documents, chunks, embeddings and indexes consistent. ``coordinator`` is the entry."""
