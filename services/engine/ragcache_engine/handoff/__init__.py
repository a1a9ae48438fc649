"""Copies KV layer by layer while a forward pass runs: out of the cache, or into it.

Not reachable from a RagCache yet: it sets neither roles of engines nor layer-wise loading.
"""
