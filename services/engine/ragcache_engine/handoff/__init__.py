"""Copies KV layer by layer while a forward pass runs: out of the cache, or into it."""
