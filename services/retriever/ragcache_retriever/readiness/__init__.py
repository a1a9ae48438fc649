"""Whether the retriever can answer: checks of its storage."""
