"""One variant as an engine or a shard of the cache store reports it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ragcache_core.identity.keys import VariantKey


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A variant that a source holds.

    Attributes:
        parent: The variant right before it. None: it was computed after nothing, as the head of a
            template is.
        num_tokens: Length of the chunk.
        num_bytes: Size of the value. 0: unknown.
        exact: Whether this copy may replace a computation: computed exactly and stored losslessly.
        cost_s: Seconds that computing it took. 0: unknown.
    """

    key: VariantKey
    parent: VariantKey | None
    num_tokens: int
    num_bytes: int
    exact: bool
    cost_s: float


@dataclass(frozen=True, slots=True)
class Residency:
    """How one source has a variant.

    Attributes:
        tier: ``device`` or ``host`` of an engine, ``memory`` or ``disk`` of a cache store.
        exact: As in ``StoredNode``.
    """

    tier: str
    exact: bool


@cache
def residency_in(tier: str, exact: bool) -> Residency:
    """Return the one object of this tier and exactness, which all nodes share."""
    return Residency(tier, exact)
