"""Fair shares of tenants in a pool of slots.

A tenant may always have its share of the slots: the capacity by weight among the tenants that hold
some, itself, and one more that might come. Beyond its share it may use all but a headroom, which
is kept for tenants below theirs. So a tenant that comes finds a slot at once, and gets the rest of
its share as slots of the others become free. No request is ended for it, and the pool never has
more than its capacity. A pool with one tenant only has no headroom.

A tenant may also have a reserved share. No other tenant takes these slots, also while the tenant
has nothing to ask. Between two changes of the shares a tenant below its reserved slots always
finds one.

Source: trunk reservation (Kelly, Loss networks, Annals of Applied Probability 1991).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

HEADROOM_SHARE: Final = 1 / 8
"""Share of a pool that tenants above their share leave free."""

_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Shares(Generic[T]):
    """What the tenants that may come may have of a pool.

    Attributes:
        weights: Of a tenant that has none here it is 1.
        reserved: Shares of the pool that are kept for a tenant, from 0 to 1; others have none.
    """

    weights: Mapping[T, float] = field(default_factory=dict)
    reserved: Mapping[T, float] = field(default_factory=dict)

    def reserved_slots(self, tenant: T, capacity: int) -> int:
        """Return the slots of a pool that no other tenant takes."""
        return int(self.reserved.get(tenant, 0.0) * capacity + _ROUNDING)

    def missing_slots(self, tenant: T, held: Mapping[T, int], capacity: int) -> int:
        """Return the reserved slots that tenants other than this one do not have yet."""
        return sum(
            max(0, self.reserved_slots(one, capacity) - held.get(one, 0))
            for one in self.reserved
            if one != tenant
        )


def share_of(tenant: T, held: Mapping[T, int], weights: Mapping[T, float], capacity: int) -> float:
    """Return the slots of a pool that a tenant may have by its weight, 1 at least.

    Args:
        held: Slots that tenants have now.
        weights: Of all tenants that may come; of any other one it is 1.
    """
    active = {one for one, count in held.items() if count} | {tenant}
    total = sum(weights.get(one, 1.0) for one in active)
    total += max((weight for one, weight in weights.items() if one not in active), default=0.0)
    return max(1.0, capacity * weights.get(tenant, 1.0) / total)


def may_enter(tenant: T, held: Mapping[T, int], shares: Shares[T], capacity: int) -> bool:
    """Whether a tenant may take one more slot of a pool.

    Args:
        held: Slots that tenants have now.
    """
    free = capacity - sum(held.values())
    if free <= 0:
        return False
    own = held.get(tenant, 0)
    if own < shares.reserved_slots(tenant, capacity):
        return True
    free -= shares.missing_slots(tenant, held, capacity)
    if free <= 0:
        return False
    if own + 1 <= share_of(tenant, held, shares.weights, capacity) + _ROUNDING:
        return True
    return free > max(1, int(HEADROOM_SHARE * capacity))
