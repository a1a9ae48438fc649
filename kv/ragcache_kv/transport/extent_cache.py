"""A client's cache of the extents of values in the memory tier that a store shares."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Tier, ValueHeader, ValuePart
from ragcache_kv.transport.transport import ValueRequest
from ragcache_kv.values.buffers import copy_verified, slice_views
from ragcache_kv.values.stored_value import Allocate, StoredValue, value_of_header


@dataclass(frozen=True, slots=True)
class CachedExtents:
    """The memory from which a complete, verified value was read, and what the value is.

    withdrawals: The store's count before the client asked for the extents.
    """

    header: ValueHeader
    views: Sequence[memoryview]
    withdrawals: int

    @classmethod
    def from_value(
        cls, value: StoredValue, views: Sequence[memoryview], withdrawals: int
    ) -> CachedExtents:
        """Return the extents of a value that was read from views."""
        header = ValueHeader(
            value.info, value.parts, value.shape, value.value_format, Tier.MEMORY, value.tag
        )
        return cls(header, views, withdrawals)

    def is_valid(self, withdrawals: int) -> bool:
        """Whether the store has withdrawn nothing, by its current count."""
        return withdrawals == self.withdrawals

    def allocate_value(self, allocate: Allocate | None) -> StoredValue:
        """Return the value with memory for its bytes. Raises InvalidInput."""
        return value_of_header(self.header, allocate)

    def copy(self, target: memoryview, start: int, parts: Sequence[ValuePart]) -> bool:
        """Copy the parts that begin at byte start of the value. Return whether all are valid."""
        is_whole = len(parts) == len(self.header.parts)
        views = self.views if is_whole else slice_views(self.views, start, len(target))
        return copy_verified(target, views, parts)


class ExtentCache:
    """The extents of the last capacity values that a client read. Safe for threads.

    The value of a key depends on ``exact`` and ``domain`` of the request, so both are in the
    cache's key.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._extents: OrderedDict[tuple[VariantKey, bool, str], CachedExtents] = OrderedDict()

    def get(self, request: ValueRequest, key: VariantKey, withdrawals: int) -> CachedExtents | None:
        """Return a key's extents; None if they are unknown or invalid by the current count."""
        name = key, request.exact, request.domain
        with self._lock:
            extents = self._extents.get(name)
            if extents is None:
                return None
            if not extents.is_valid(withdrawals):
                del self._extents[name]
                return None
            self._extents.move_to_end(name)
            return extents

    def put(self, request: ValueRequest, key: VariantKey, extents: CachedExtents) -> None:
        """Keep a key's extents, and evict the least recently used ones beyond the capacity."""
        name = key, request.exact, request.domain
        with self._lock:
            self._extents[name] = extents
            self._extents.move_to_end(name)
            if len(self._extents) > self._capacity:
                self._extents.popitem(last=False)

    def remove(self, request: ValueRequest, key: VariantKey) -> None:
        """Drop a key's extents, which do not hold its value any more."""
        with self._lock:
            self._extents.pop((key, request.exact, request.domain), None)
