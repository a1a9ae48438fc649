"""Embedders: the bundled model, and a client of OpenAI-compatible endpoints."""
