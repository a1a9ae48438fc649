"""The deletes that a store remembers, and what they cover."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from math import ceil

from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Origin
from ragcache_core.store_api import Deletion, ForgottenDeletes, Tombstone

AWAY_MS = 23 * 3600 * 1000
"""How long a folder may be away and keep its variants.

It is less than LIFETIME_MS, because clocks differ and a pull takes time.
"""

LIFETIME_MS = 24 * 3600 * 1000
"""How long a delete is remembered after this store applied it."""

TOMBSTONE_BYTES = 224
NAME_BYTES = 144
"""Memory of a tombstone, and of each name in it, with the dicts. Measured."""

PARTS = 1024
"""Number of dicts. A dict that grows copies all of its entries at once, so each must be small."""

_LONG_AGO_MS = -(1 << 62)
_NEVER_MS = 1 << 62


class Tombstones:
    """Tombstones in the order of their sequence. The store's lock guards them.

    RocksDB has the deletes themselves. In memory are only their names, each with the sequence of
    the last delete that has it. Deletes are forgotten from the oldest on. A computation that has
    not seen a forgotten delete may be covered by it, so ``covers`` is true for it.

    Times are on the store's steady clock, so a jump of the wall clock changes none of them. For
    plans from before the start, Unix times are compared instead. The wall clock may have been wrong
    when the store started, so the age of what it found then may be wrong.

    Attributes:
        last_sequence: Sequence of the last delete, even if it is forgotten.
        forgotten_sequence: Sequence of the last delete that was forgotten; 0 if there is none.
        num_bytes: Estimated memory.
    """

    def __init__(self, last_sequence: int = 0) -> None:
        self.last_sequence = last_sequence
        self.forgotten_sequence = 0
        self.num_bytes = 0
        self._started_ms = _LONG_AGO_MS
        self._forgotten_ms = _LONG_AGO_MS
        self._forgotten_unix_ms = _LONG_AGO_MS
        self._ids = SequenceIndex()
        self._chunks = SequenceIndex()
        self._variants = SequenceIndex()
        self._documents = SequenceIndex()
        self._domains = SequenceIndex()
        self._everything = 0
        # One item for each tombstone, from _first on. Both ascend.
        self._sequences = array("Q")
        self._applied_ms = array("q")
        # The same with Unix times, for those found at start, which are the first ones.
        self._found_unix_ms = array("q")
        self._first = 0

    @classmethod
    def recovered(
        cls,
        tombstones: Iterable[Tombstone],
        last_sequence: int,
        forgotten: ForgottenDeletes,
        clock: SteadyClock,
    ) -> Tombstones:
        """Return the tombstones found at start, which are in order.

        They count as applied when they were made, which was not later.
        """
        found = cls(last_sequence)
        unix_ms = applied_ms = _LONG_AGO_MS
        if forgotten.sequence:
            unix_ms = forgotten.applied_at_ms
            found.forgotten_sequence = forgotten.sequence
            found._forgotten_ms, found._forgotten_unix_ms = clock.of_unix(unix_ms), unix_ms
        for tombstone in tombstones:
            unix_ms = max(unix_ms, tombstone.deletion.made_at_ms)
            applied_ms = max(applied_ms, clock.of_unix(unix_ms))
            found.add(tombstone, applied_ms)
            found._found_unix_ms.append(unix_ms)
        found._started_ms = clock.now_ms()
        return found

    def __len__(self) -> int:
        return len(self._sequences) - self._first

    def __contains__(self, deletion_id: bytes) -> bool:
        return deletion_id in self._ids

    def add(self, tombstone: Tombstone, applied_ms: int) -> None:
        """Add a delete with a new id, and a sequence greater than all before.

        Args:
            applied_ms: Now, on the steady clock.
        """
        deletion, sequence = tombstone.deletion, tombstone.sequence
        self._ids.set(deletion.id, sequence)
        self._applied_ms.append(applied_ms)
        self._sequences.append(sequence)
        self.last_sequence = max(self.last_sequence, sequence)
        self.num_bytes += _num_bytes(deletion)
        if deletion.names_nothing:
            self._everything = sequence
        for index, name in self._names(deletion):
            index.set(name, sequence)

    def covers(self, key: VariantKey, origin: Origin, after: int) -> bool:
        """Return whether a delete with a sequence greater than after may cover this variant."""
        if self.last_sequence <= after:
            return False
        if self.forgotten_sequence > after or self._everything > after:
            return True
        document = (origin.domain, origin.document)
        return (
            self._chunks.get(key.chunk) > after
            or self._variants.get(key) > after
            or (bool(origin.document) and self._documents.get(document) > after)
            or self._domains.get(origin.domain) > after
            or any(self._chunks.get(chunk) > after for chunk in origin.prefix_chunks)
        )

    def names(self, key: VariantKey) -> bool:
        """Return whether a delete names this variant or its chunk."""
        return key.chunk in self._chunks or key in self._variants

    def applied_by(self, at_ms: int, unix_ms: int) -> int:
        """Return the sequence of the last delete that was applied by a time, or 0.

        A forgotten delete counts only if every forgotten one was applied by then.

        Args:
            at_ms: The time on the steady clock.
            unix_ms: The same as Unix time.
        """
        times, time_ms, forgotten_ms = self._applied_ms, at_ms, self._forgotten_ms
        if at_ms < self._started_ms:
            times, time_ms = self._found_unix_ms, unix_ms
            forgotten_ms = self._forgotten_unix_ms
        first = min(self._first, len(times))
        end = bisect_right(times, time_ms, first)
        if end > first:
            return self._sequences[end - 1]
        return self.forgotten_sequence if forgotten_ms <= time_ms else 0

    def num_due(self, before_ms: int, max_bytes: int, limit: int) -> int:
        """Return how many of the oldest deletes to forget now, at most limit.

        Args:
            before_ms: Deletes that were applied before this time are due.
            max_bytes: While more memory is in use, the oldest are due at any age. Their number is
                estimated by the mean size, so the caller asks again.
        """
        num_old = bisect_left(self._applied_ms, before_ms, self._first) - self._first
        excess_bytes = max(0, self.num_bytes - max_bytes)
        num_excess = ceil(excess_bytes * len(self) / self.num_bytes) if excess_bytes else 0
        return min(limit, max(num_old, num_excess))

    def applied_unix_ms(self, number: int, clock: SteadyClock) -> int:
        """Return the Unix time of the number-th of the oldest deletes, from 1 on."""
        index = self._first + number - 1
        if index < len(self._found_unix_ms):
            return self._found_unix_ms[index]
        return clock.to_unix(self._applied_ms[index])

    def forget(self, oldest: Sequence[Tombstone]) -> None:
        """Forget the oldest deletes, which are passed in order. Takes time by their number only."""
        for tombstone in oldest:
            sequence, deletion = tombstone.sequence, tombstone.deletion
            assert self._sequences[self._first] == sequence
            self.forgotten_sequence = sequence
            self._forgotten_ms = self._applied_ms[self._first]
            is_found = self._first < len(self._found_unix_ms)
            self._forgotten_unix_ms = self._found_unix_ms[self._first] if is_found else _NEVER_MS
            self._first += 1
            self.num_bytes -= _num_bytes(deletion)
            self._ids.remove(deletion.id, sequence)
            for index, name in self._names(deletion):
                index.remove(name, sequence)
        if 2 * self._first > len(self._sequences):
            for items in (self._sequences, self._applied_ms, self._found_unix_ms):
                del items[: self._first]
            self._first = 0

    def _names(self, deletion: Deletion) -> Iterator[tuple[SequenceIndex, Hashable]]:
        for chunk in deletion.chunks:
            yield self._chunks, chunk
        for key in deletion.variants:
            yield self._variants, key
        for document in deletion.documents:
            yield self._documents, (deletion.domain, document)
        if deletion.domain and not deletion.documents:
            yield self._domains, deletion.domain


def _num_bytes(deletion: Deletion) -> int:
    chars = len(deletion.domain) + sum([len(document) for document in deletion.documents])
    return TOMBSTONE_BYTES + NAME_BYTES * deletion.num_names + 4 * chars


class SequenceIndex:
    """The last sequence of each name, 0 for a name without one. It never stalls."""

    def __init__(self) -> None:
        self._parts: list[dict[Hashable, int]] = [{} for _ in range(PARTS)]

    def __contains__(self, name: Hashable) -> bool:
        return name in self._parts[hash(name) % PARTS]

    def get(self, name: Hashable) -> int:
        """Return the sequence of a name."""
        return self._parts[hash(name) % PARTS].get(name, 0)

    def set(self, name: Hashable, sequence: int) -> None:
        """Replace the sequence of a name."""
        self._parts[hash(name) % PARTS][name] = sequence

    def remove(self, name: Hashable, sequence: int) -> None:
        """Remove a name, unless it has a later sequence by now."""
        part = self._parts[hash(name) % PARTS]
        if part.get(name) == sequence:
            del part[name]


class SteadyClock:
    """Milliseconds that pass evenly. Only their differences have a meaning.

    The wall clock of a machine may be wrong for a while and then jump. A store that remembers Unix
    times would keep such an error for as long as it remembers them. So it remembers when something
    happened on this clock, and converts the Unix times of others when it needs them. The conversion
    asks how long ago they were, by the wall clock as it is then.

    Args:
        monotonic: Returns seconds of a clock that is never set.
        wall_ms: Returns the Unix time in milliseconds.
    """

    def __init__(self, monotonic: Callable[[], float], wall_ms: Callable[[], int]) -> None:
        self._monotonic = monotonic
        self._wall_ms = wall_ms

    def now_ms(self) -> int:
        """Return the time now."""
        return int(self._monotonic() * 1000)

    def of_unix(self, unix_ms: int) -> int:
        """Return when a Unix time was. One that is still to come counts as now."""
        # Read first: if this thread is interrupted in between, the result is too early, and a
        # computation counts as having seen fewer deletes.
        now_ms = self.now_ms()
        return now_ms - max(0, self._wall_ms() - unix_ms)

    def to_unix(self, at_ms: int) -> int:
        """Return the Unix time, by the wall clock as it is now, of a time on this clock."""
        return max(0, self._wall_ms() - (self.now_ms() - at_ms))
