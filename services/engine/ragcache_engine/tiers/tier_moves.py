"""Decide which values move between a worker's tiers, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ragcache_core.tiering.precision_assignment import Placement


@dataclass(slots=True)
class TierMoves:
    """What must change so that each value is in its assigned tier. Apply the fields in this order.

    Attributes:
        evicted: Variants that leave their tier, and no tier stores them afterwards.
        replaced: Variants that leave their tier because an offer has a newer value. A variant that
            is assigned to no tier is dropped.
        unavailable: Variants that the policy assigned to a tier, but that have neither a stored
            value nor an offer. The policy must forget them.
        copies: The target tier of each variant to copy, demotions first.
    """

    evicted: list[bytes] = field(default_factory=list)
    replaced: list[bytes] = field(default_factory=list)
    unavailable: list[bytes] = field(default_factory=list)
    copies: dict[bytes, Placement] = field(default_factory=dict)


def plan_tier_moves(
    assigned: Mapping[bytes, Placement],
    current: Mapping[bytes, Placement],
    offered: Collection[bytes],
) -> TierMoves:
    """Compare the assigned tier of each variant with its current one.

    Invariant: demotions come first, because they make room for promotions. So ``copies`` has all
    copies to host memory before those to the device.

    Args:
        assigned: The policy's tier of each variant. ``Placement.DISK``: in no tier of the worker.
        current: The tier that stores a variant now.
        offered: Variants for which there is a new value.
    """
    moves = TierMoves()
    copies: dict[bytes, Placement] = {}
    for name, tier in assigned.items():
        stored_in, is_offered = current.get(name), name in offered
        if stored_in is not None and is_offered:
            moves.replaced.append(name)
        elif stored_in is not None and tier is Placement.DISK:
            moves.evicted.append(name)
        elif stored_in is None and tier is not Placement.DISK and not is_offered:
            moves.unavailable.append(name)
            continue
        if tier is not Placement.DISK and (is_offered or stored_in is not tier):
            copies[name] = tier
    demotions = {name: tier for name, tier in copies.items() if tier is Placement.PINNED}
    moves.copies = demotions | copies
    return moves
