"""The retriever owns documents: it splits, stores and embeds them, and searches their chunks.

SQLite or PostgreSQL holds documents, chunks, embeddings and words. Vectors are searched in an index
of this process, in pgvector or in Milvus. Words are searched by the store.
"""
