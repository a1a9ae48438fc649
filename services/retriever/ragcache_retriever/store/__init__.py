"""Stores of documents, chunks and embeddings, in SQLite and in PostgreSQL."""
