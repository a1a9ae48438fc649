"""Vector search by pgvector."""
