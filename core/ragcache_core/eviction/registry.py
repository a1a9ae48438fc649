"""Names of the policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.comparison_policies.fifo import FirstInFirstOut
from bench.comparison_policies.gdsf import GreedyDualSizeFrequency
from bench.comparison_policies.lfu import LeastFrequentlyUsed
from bench.comparison_policies.s3fifo import S3Fifo
from ragcache_core.eviction.cachecraft import CacheCraft
from ragcache_core.eviction.lru import LeastRecentlyUsed
from ragcache_core.eviction.pgdsf import PrefixAwareGreedyDualSizeFrequency
from ragcache_core.eviction.policy import Policy
from ragcache_core.eviction.score import Score

_POLICIES: dict[str, Callable[..., Policy[Any]]] = {
    "score": Score,
    "pgdsf": PrefixAwareGreedyDualSizeFrequency,
    "gdsf": GreedyDualSizeFrequency,
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
    "s3fifo": S3Fifo,
    "cachecraft": CacheCraft,
}
POLICY_NAMES = tuple(_POLICIES)
DEFAULT_POLICY = "score"


def make_policy(name: str, *, leaves_only: bool, **settings: float) -> Policy[Any]:
    """A policy by name, empty. settings: those of its class.

    Raises ValueError for a name that is not in POLICY_NAMES, TypeError for a setting it has not.
    """
    try:
        policy = _POLICIES[name]
    except KeyError:
        raise ValueError(f"no policy {name!r}; one of {', '.join(POLICY_NAMES)}") from None
    return policy(leaves_only=leaves_only, **settings)
