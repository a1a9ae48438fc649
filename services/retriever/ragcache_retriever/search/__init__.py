"""Staged vector search over the chunks of a collection."""
