"""Clients of the cache store: one store or all shards, blocking or async."""
