"""Which variants of a shard deserve a copy on another shard.

Mooncake (sections 4.2, 5.3.3) spreads copies of the hottest blocks by load, so that no node becomes
a bottleneck and no popularity has to be predicted. Here a shard measures what it serves. A variant
with more than a share of the shard's recent traffic gets a copy on the next shard in rendezvous
order. It loses the copy when its share has become small. The two thresholds differ, so that
copies are not created and dropped repeatedly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ragcache_core.identity.keys import VariantKey

FORGET_BELOW = 1.0
"""Decayed bytes below which a variant is forgotten."""


class ServedBytes:
    """Bytes served of each variant, decayed: those half_life_s ago count half."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        # All numbers are as of one time, so they decay only when they are read.
        self._origin = 0.0
        self._bytes: dict[VariantKey, float] = {}
        self._total = 0.0

    def add(self, key: VariantKey, num_bytes: int, now: float) -> None:
        """Record served bytes of a variant.

        Args:
            key: The variant.
            num_bytes: Served bytes.
            now: Seconds of a monotonic clock.
        """
        if now - self._origin > 64 * self._half_life_s:
            self._settle(now)
        weighted = num_bytes * 2.0 ** ((now - self._origin) / self._half_life_s)
        self._bytes[key] = self._bytes.get(key, 0.0) + weighted
        self._total += weighted

    def measure_load(self, now: float) -> ShardLoad:
        """Return the recent load, and forget variants that are no longer served."""
        self._settle(now)
        # A constant stream of r bytes per second has the decayed sum r * half_life / ln 2.
        seconds = self._half_life_s / math.log(2.0)
        return ShardLoad(
            self._total / seconds, {key: sum_ / seconds for key, sum_ in self._bytes.items()}
        )

    def _settle(self, now: float) -> None:
        factor = 2.0 ** ((self._origin - now) / self._half_life_s)
        decayed = ((key, sum_ * factor) for key, sum_ in self._bytes.items())
        self._bytes = {key: sum_ for key, sum_ in decayed if sum_ >= FORGET_BELOW}
        self._total = sum(self._bytes.values())
        self._origin = now


@dataclass(frozen=True, slots=True)
class ShardLoad:
    """Bytes per second that a shard serves, in total and of each variant."""

    bytes_per_s: float
    by_variant: Mapping[VariantKey, float]


@dataclass(frozen=True, slots=True)
class ReplicationThresholds:
    """When to create and drop copies, as shares of the load of a shard.

    Attributes:
        copy_share: A variant above it gets a copy.
        drop_share: A variant below it loses its copy.
        min_bytes_per_s: A shard below it is not busy and creates no copy.
        max_copies: Most copies that one shard has on others at a time.
    """

    copy_share: float = 0.1
    drop_share: float = 0.02
    min_bytes_per_s: float = 64e6
    max_copies: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.drop_share < self.copy_share <= 1:
            raise ValueError("0 <= drop_share < copy_share <= 1 must hold")


@dataclass(frozen=True, slots=True)
class ReplicationChanges:
    """Variants to copy, most served first, and variants whose copies are dropped."""

    copy: tuple[VariantKey, ...] = ()
    drop: tuple[VariantKey, ...] = ()


def decide_replication(
    load: ShardLoad, replicated: frozenset[VariantKey], thresholds: ReplicationThresholds
) -> ReplicationChanges:
    """Decide which copies to create and drop.

    A variant that is the only one served has a share of 1. It is copied, because another shard can
    help; a shard that is not busy copies nothing.

    Args:
        load: Of this shard.
        replicated: Variants that this shard has copied to another one.
    """
    min_bytes_per_s = thresholds.min_bytes_per_s
    busy = load.bytes_per_s >= min_bytes_per_s
    # A copy halves the load of this shard, so the threshold to drop copies is far lower.
    calm = load.bytes_per_s < min_bytes_per_s / 4

    def share(key: VariantKey) -> float:
        return load.by_variant.get(key, 0.0) / load.bytes_per_s if load.bytes_per_s else 0.0

    drop = tuple(
        sorted(
            (key for key in replicated if calm or share(key) < thresholds.drop_share),
            key=VariantKey.to_bytes,
        )
    )
    if not busy:
        return ReplicationChanges(drop=drop)
    hot = (
        key
        for key in load.by_variant
        if key not in replicated and share(key) > thresholds.copy_share
    )
    num_free = thresholds.max_copies - (len(replicated) - len(drop))
    hottest = sorted(hot, key=lambda key: (-load.by_variant[key], key.to_bytes()))
    return ReplicationChanges(copy=tuple(hottest[: max(0, num_free)]), drop=drop)
