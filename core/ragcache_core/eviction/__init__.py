"""Eviction policies: which entry of a tier is evicted first when room is needed.

``policy`` has the interface, ``registry`` the names. A policy stores no values and has no capacity:
it selects the next victim, and the tier asks until there is room.
"""

from __future__ import annotations

from ragcache_core.eviction.policy import EvictionCandidate, EvictionPolicy
from ragcache_core.eviction.registry import DEFAULT_POLICY, POLICY_NAMES, PolicyName, make_policy

__all__ = [
    "DEFAULT_POLICY",
    "POLICY_NAMES",
    "EvictionCandidate",
    "EvictionPolicy",
    "PolicyName",
    "make_policy",
]
