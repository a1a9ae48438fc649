"""Which variants of a shard deserve a copy on another shard: hot-spot replication.

Mooncake (§4.2, §5.3.3) lets copies of the hottest blocks spread by load, so that nobody waits for
the one node that holds what everybody asks for; no popularity has to be predicted. Here a shard
watches what it serves: a variant whose bytes make up more than a share of the shard's recent
traffic gets a copy on the next shard in rendezvous order, and loses it when that share has become
small. Between the two shares lies room, so that nothing is copied to and fro.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ragcache_core.identity.keys import VariantKey

FORGET_BELOW = 1.0
"""Decayed bytes below which a variant is as good as never served."""


class ServedBytes:
    """Bytes served of each variant, decayed: those half_life_s ago count half."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        # All numbers are as of one instant, so that decay costs nothing until they are read.
        self._origin = 0.0
        self._bytes: dict[VariantKey, float] = {}
        self._total = 0.0

    def add(self, key: VariantKey, num_bytes: int, now: float) -> None:
        """num_bytes of key were served. now: seconds on a clock that never goes back."""
        if now - self._origin > 64 * self._half_life_s:
            self._settle(now)
        weighted = num_bytes * 2.0 ** ((now - self._origin) / self._half_life_s)
        self._bytes[key] = self._bytes.get(key, 0.0) + weighted
        self._total += weighted

    def measure_load(self, now: float) -> ShardLoad:
        """What has been served lately; forgets what has not."""
        self._settle(now)
        # A constant stream of r bytes a second has the decayed sum r * half_life / ln 2.
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
    """What a shard serves, in bytes a second: of everything, and of each variant."""

    bytes_per_s: float
    by_variant: Mapping[VariantKey, float]


@dataclass(frozen=True, slots=True)
class ReplicationThresholds:
    """When to copy and when to drop, as shares of a shard's load.

    least_bytes_per_s: a shard that serves less than this is not busy, and nothing of it is hot.
    most: of replicas that one shard has made at a time, which bounds what others hold for it.
    """

    copy_share: float = 0.1
    drop_share: float = 0.02
    least_bytes_per_s: float = 64e6
    most: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.drop_share < self.copy_share <= 1:
            raise ValueError("0 <= drop_share < copy_share <= 1")


@dataclass(frozen=True, slots=True)
class ReplicationChanges:
    """Variants that are to be copied, hottest first, and those whose replicas are to go."""

    copy: tuple[VariantKey, ...] = ()
    drop: tuple[VariantKey, ...] = ()


def decide_replication(
    load: ShardLoad, replicated: frozenset[VariantKey], thresholds: ReplicationThresholds
) -> ReplicationChanges:
    """What to change. replicated: what this shard has copied to another.

    A shard that serves only one variant gives it a share of 1: with another shard to help, that
    is the very case to copy; one that is not busy copies nothing.
    """
    least = thresholds.least_bytes_per_s
    busy = load.bytes_per_s >= least
    # Far less busy before replicas go, for the same reason as with the shares: what a replica takes
    # off this shard must not make it look calm, and with two holders it serves half.
    calm = load.bytes_per_s < least / 4

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
    room = thresholds.most - (len(replicated) - len(drop))
    hottest = sorted(hot, key=lambda key: (-load.by_variant[key], key.to_bytes()))
    return ReplicationChanges(copy=tuple(hottest[: max(0, room)]), drop=drop)
