"""Names of the eviction policies that a cache store offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ragcache_core.eviction.cachecraft import CacheCraft
from ragcache_core.eviction.pgdsf import PrefixAwareGreedyDualSizeFrequency
from ragcache_core.eviction.policy import EvictionPolicy
from ragcache_core.eviction.ranked import LeastRecentlyUsed
from ragcache_core.eviction.score import ScorePolicy

PolicyName = Literal["score", "pgdsf", "lru", "cachecraft"]
"""What the spec, the settings and the metrics name."""

_POLICIES: dict[PolicyName, Callable[..., EvictionPolicy[Any]]] = {
    "score": ScorePolicy,
    "pgdsf": PrefixAwareGreedyDualSizeFrequency,
    "lru": LeastRecentlyUsed,
    "cachecraft": CacheCraft,
}
POLICY_NAMES: tuple[str, ...] = tuple(_POLICIES)
DEFAULT_POLICY = "score"


def make_policy(name: str, *, leaves_only: bool, **settings: float) -> EvictionPolicy[Any]:
    """Return an empty policy by its name.

    Args:
        name: One of POLICY_NAMES.
        leaves_only: As for ``EvictionPolicy``.
        settings: Keyword arguments of the policy's class.

    Raises:
        ValueError: The name is not in POLICY_NAMES.
        TypeError: The class does not have one of the settings.
    """
    for known, policy in _POLICIES.items():
        if known == name:
            return policy(leaves_only=leaves_only, **settings)
    raise ValueError(f"no policy {name!r}; use one of {', '.join(POLICY_NAMES)}")
