"""Where values lie in the memory that a store shares, as a client on its machine remembers it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Tier, ValuePart, ValueShape, VariantInfo
from ragcache_kv.transport.transport import ValueRequest
from ragcache_kv.values.buffers import copy_verified, slice_views
from ragcache_kv.values.stored_value import Allocate, StoredValue, allocate_buffer


@dataclass(frozen=True, slots=True)
class CachedExtents:
    """Where a value was read from, whole and verified, and what it is.

    withdrawals: the store's count before it was asked for this place.
    """

    info: VariantInfo
    parts: tuple[ValuePart, ...]
    shape: ValueShape | None
    value_format: int
    views: Sequence[memoryview]
    withdrawals: int

    @classmethod
    def of(cls, value: StoredValue, views: Sequence[memoryview], withdrawals: int) -> CachedExtents:
        """The place of a value that was read from views."""
        return cls(value.info, value.parts, value.shape, value.value_format, views, withdrawals)

    def is_valid(self, withdrawals: int) -> bool:
        """Whether nothing was withdrawn, by the store's count now, that could be this value."""
        return withdrawals == self.withdrawals

    def allocate_value(self, allocate: Allocate | None) -> StoredValue:
        """The value, with memory that its bytes are to be read into. Raises InvalidInput."""
        room = allocate_buffer(self.info, allocate)
        return StoredValue(self.info, self.parts, self.shape, self.value_format, room, Tier.MEMORY)

    def copy(self, target: memoryview, start: int, parts: Sequence[ValuePart]) -> bool:
        """Copy parts, which begin at start, to memory of their size; whether all were good."""
        views = (
            self.views
            if len(parts) == len(self.parts)
            else slice_views(self.views, start, len(target))
        )
        return copy_verified(target, views, parts)


class ExtentCache:
    """The places of at most capacity values, those used last. Safe for threads.

    What a key is answered with depends on what else was asked, so that is part of what is known.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._places: OrderedDict[tuple[VariantKey, bool, str], CachedExtents] = OrderedDict()

    def get(self, asking: ValueRequest, key: VariantKey, withdrawals: int) -> CachedExtents | None:
        """Where a key's value was; None if that is not known, or not valid by the count now."""
        name = key, asking.exact, asking.domain
        with self._lock:
            place = self._places.get(name)
            if place is None:
                return None
            if not place.is_valid(withdrawals):
                del self._places[name]
                return None
            self._places.move_to_end(name)
            return place

    def remember(self, asking: ValueRequest, key: VariantKey, place: CachedExtents) -> None:
        """A key's value was read from place."""
        name = key, asking.exact, asking.domain
        with self._lock:
            self._places[name] = place
            self._places.move_to_end(name)
            if len(self._places) > self._capacity:
                self._places.popitem(last=False)

    def forget(self, asking: ValueRequest, key: VariantKey) -> None:
        """A key's value is not where it was."""
        with self._lock:
            self._places.pop((key, asking.exact, asking.domain), None)
