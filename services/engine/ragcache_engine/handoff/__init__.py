"""Copies KV layer by layer while a forward pass runs: out of the cache, or into it.

Not reachable from a RagCache yet: its engines have no roles, and it does not set layer-wise loading.
"""
