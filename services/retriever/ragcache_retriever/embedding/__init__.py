"""Embedders: models in this process, and a client of OpenAI-compatible endpoints."""
