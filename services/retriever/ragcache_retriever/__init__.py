"""The retriever owns documents: it splits, stores and embeds them, and searches their chunks.

SQLite holds documents, chunks and embeddings. The faiss index is rebuilt from it at each start.
"""
