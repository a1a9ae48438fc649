"""Which entry of a tier goes first when room is needed: one interface, one module per policy.

``policy`` has the interface, ``registry`` the names. A policy holds no values and no capacity: it
says who goes next, the tier asks until there is room.
"""

from __future__ import annotations

from ragcache_core.eviction.policy import EvictionCandidate, EvictionPolicy
from ragcache_core.eviction.registry import DEFAULT_POLICY, POLICY_NAMES, make_policy

__all__ = ["DEFAULT_POLICY", "POLICY_NAMES", "EvictionCandidate", "EvictionPolicy", "make_policy"]
