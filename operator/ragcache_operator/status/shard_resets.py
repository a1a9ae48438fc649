"""Events for shards of the cache store that started empty because their data was damaged."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ragcache_operator.status.events import ObjectEvent

RECENT_MS = 3600 * 1000
"""An operator that has just started reports resets up to this age. Others were reported before."""


@dataclass(frozen=True, slots=True)
class ShardReset:
    """A start of a shard with an empty data folder. ``at_ms`` is a Unix time."""

    shard: str
    at_ms: int
    reason: str


def unreported_resets(
    resets: Iterable[ShardReset], reported: Collection[ShardReset], now_ms: int
) -> list[ShardReset]:
    """Return the recent resets that no Event has reported."""
    return [reset for reset in resets if reset not in reported and now_ms - reset.at_ms < RECENT_MS]


def reset_event(reset: ShardReset) -> ObjectEvent:
    """Return the Event that reports a reset."""
    return ObjectEvent(
        "Warning",
        "CacheDataDamaged",
        f"cache store shard {reset.shard} has started empty, because its metadata was damaged; "
        f"check its volume. {reset.reason}",
    )
