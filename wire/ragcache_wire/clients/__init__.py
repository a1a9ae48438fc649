"""Typed async clients of the retriever, the engine and the gRPC health service."""
