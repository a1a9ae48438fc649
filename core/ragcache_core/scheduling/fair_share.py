"""Fair shares of tenants in a pool of slots.

A tenant may always have its share of the slots: the capacity by weight among the tenants that hold
some, itself, and one more that might come. Beyond its share it may use all but a headroom, which
is kept for tenants below theirs. So a tenant that comes finds a slot at once, and gets the rest of
its share as slots of the others become free. No request is ended for it, and the pool never has
more than its capacity. A pool with one tenant only has no headroom.

Source: trunk reservation (Kelly, Loss networks, Annals of Applied Probability 1991).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final, TypeVar

T = TypeVar("T", bound=Hashable)

HEADROOM_SHARE: Final = 1 / 8
"""Share of a pool that tenants above their share leave free."""

_ROUNDING: Final = 1e-6


def share_of(tenant: T, held: Mapping[T, int], weights: Mapping[T, float], capacity: int) -> float:
    """Return the slots of a pool that a tenant may always have, 1 at least.

    Args:
        held: Slots that tenants have now.
        weights: Of all tenants that may come; of any other one it is 1.
    """
    active = {one for one, count in held.items() if count} | {tenant}
    total = sum(weights.get(one, 1.0) for one in active)
    total += max((weight for one, weight in weights.items() if one not in active), default=0.0)
    return max(1.0, capacity * weights.get(tenant, 1.0) / total)


def may_enter(tenant: T, held: Mapping[T, int], weights: Mapping[T, float], capacity: int) -> bool:
    """Whether a tenant may take one more slot of a pool. Arguments are those of ``share_of``."""
    free = capacity - sum(held.values())
    if free <= 0:
        return False
    if held.get(tenant, 0) + 1 <= share_of(tenant, held, weights, capacity) + _ROUNDING:
        return True
    return free > max(1, int(HEADROOM_SHARE * capacity))
