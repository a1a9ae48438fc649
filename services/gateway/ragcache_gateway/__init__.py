"""The gateway: an OpenAI-compatible REST interface in front of the retriever and the engines."""
