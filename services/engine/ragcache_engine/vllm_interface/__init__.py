"""What the connector needs of vLLM's own objects: checks at start, and block hashes."""
