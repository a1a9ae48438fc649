"""Stores of documents, chunks and embeddings. Each backend implements ``document_store``."""
