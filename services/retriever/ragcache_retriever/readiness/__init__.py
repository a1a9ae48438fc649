"""Whether the retriever can answer: its storage, and what replicas add."""
