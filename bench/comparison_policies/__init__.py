"""Eviction policies that the benchmarks compare with, and a registry of them and the product's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.comparison_policies.fifo import FirstInFirstOut
from bench.comparison_policies.gdsf import GreedyDualSizeFrequency
from bench.comparison_policies.lfu import LeastFrequentlyUsed
from bench.comparison_policies.s3fifo import S3Fifo
from ragcache_core.eviction import POLICY_NAMES as PRODUCT_POLICY_NAMES
from ragcache_core.eviction import EvictionPolicy
from ragcache_core.eviction import make_policy as make_product_policy

_COMPARISON_POLICIES: dict[str, Callable[..., EvictionPolicy[Any]]] = {
    "gdsf": GreedyDualSizeFrequency,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
    "s3fifo": S3Fifo,
}
POLICY_NAMES = (*PRODUCT_POLICY_NAMES, *_COMPARISON_POLICIES)


def make_policy(name: str, *, leaves_only: bool, **settings: float) -> EvictionPolicy[Any]:
    if name in _COMPARISON_POLICIES:
        return _COMPARISON_POLICIES[name](leaves_only=leaves_only, **settings)
    return make_product_policy(name, leaves_only=leaves_only, **settings)
