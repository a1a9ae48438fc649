"""The knowledge tree: which KV is stored where, by the order of chunks in a prompt."""
