"""API keys of a RagCache: the Secrets, their mounts, and the keys of the operator itself."""
