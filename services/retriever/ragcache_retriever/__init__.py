"""Documents in, ranked chunks out: the service that owns documents.

documents (SQLite, the source of truth) → chunking → embedder → index (faiss, rebuilt at start);
knowledge_base joins them, service speaks gRPC.
"""
