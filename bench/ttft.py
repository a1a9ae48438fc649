"""Time to first token with the KV of the prompt's chunks in the store, against computing it.

Cold: plain vLLM, without our connector and without its prefix cache. Warm: a fresh vLLM with our
connector, whose own cache is empty, so that all reused KV comes out of the store. Same prompts,
interleaved, medians. The greedy tokens of both must be equal, also after a stored value has been
corrupted on disk: that is detected, counted and recomputed.
"""

from __future__ import annotations

from ragcache_cachestore.disk import corrupt_for_test  # noqa: F401

