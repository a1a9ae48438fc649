"""The gateway: an OpenAI-compatible front of the retriever and the engine."""
