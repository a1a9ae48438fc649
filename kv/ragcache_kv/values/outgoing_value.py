"""Values on their way to a store, of which the last bytes need not be there when the first go."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, final

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.store_api import LEASE_S, NewVariant, PutCompletion
from ragcache_kv.values.buffers import checksummed_parts

ANSWER_S = 1.0
ANSWER_SHARE = 0.2
"""What a store has for its answers of a put's time: so many seconds, or this share of little."""

T = TypeVar("T")


class IncompleteValue(RagCacheError):
    """A value did not become whole, or not in time; nothing of it is stored."""


class OutgoingValue(ABC):
    """A value that is put. raw: all of it, one part after another; one byte each, contiguous."""

    def __init__(self, raw: memoryview) -> None:
        self.raw = raw if raw.ndim == 1 and raw.format == "B" else raw.cast("B")

    @abstractmethod
    def wait_for_parts(self, done: int, deadline: float) -> Sequence[int]:
        """XXH3-64 of parts that are there, from part done on: one at least, else it waits for that.

        deadline: on time.monotonic's clock. May be asked anew from the begin. Raises IncompleteValue.
        """

    @abstractmethod
    def wait_until_final(self, deadline: float) -> float:
        """Seconds that computing it took, 0 where unknown, when it is known to be right.

        Every part may be there before that. Raises IncompleteValue.
        """


@final
class ReadyValue(OutgoingValue):
    """A value all of which is there. checksums: of its parts. cost_s: that computing it took."""

    def __init__(self, raw: memoryview, checksums: Sequence[int], cost_s: float = 0.0) -> None:
        super().__init__(raw)
        self._checksums = tuple(checksums)
        self._cost_s = cost_s

    @classmethod
    def with_checksums(
        cls, raw: memoryview, part_bytes: Sequence[int], cost_s: float = 0.0
    ) -> ReadyValue:
        """A value with the checksums that parts of these sizes have."""
        return cls(raw, [part.checksum for part in checksummed_parts(raw, part_bytes)], cost_s)

    def wait_for_parts(self, done: int, deadline: float) -> Sequence[int]:
        """See OutgoingValue."""
        return self._checksums[done:]

    def wait_until_final(self, deadline: float) -> float:
        """See OutgoingValue."""
        return self._cost_s


class OutgoingRuns(Iterator[memoryview]):
    """The bytes of an outgoing value as they come, each time as many as are there by then.

    A store keeps room for the rest no longer than LEASE_S from the first run on. Part of the time
    is left for its answers, so that an engine's slowness is never taken for a store's.
    checksums: of the parts that have come so far.
    """

    def __init__(self, variant: NewVariant, value: OutgoingValue, deadline: float) -> None:
        """Raises InvalidInput for a value of another size than its variant's."""
        _check_size("value", len(value.raw), variant.info.num_bytes)
        _check_size("variant.part_bytes", sum(variant.part_bytes), variant.info.num_bytes)
        if not variant.part_bytes:
            raise InvalidInput("variant.part_bytes", "is empty", "give the size of each part")
        self.checksums: list[int] = []
        left_s = max(0.0, deadline - time.monotonic())
        self._deadline = deadline - min(ANSWER_S, ANSWER_SHARE * left_s)
        self._sizes = variant.part_bytes
        self._value = value
        self._start = 0

    def __next__(self) -> memoryview:
        """Raises IncompleteValue; InvalidInput for a value of more or fewer parts than its variant's."""
        if self.are_complete:
            raise StopIteration
        done = len(self.checksums)
        came = self._waited(lambda: self._value.wait_for_parts(done, self._deadline))
        if not 1 <= len(came) <= len(self._sizes) - done:
            raise InvalidInput(
                "value",
                f"has {done + len(came)} parts",
                f"give {len(self._sizes)}, as allocate_value",
            )
        if not done:
            self._deadline = min(self._deadline, time.monotonic() + LEASE_S - ANSWER_S)
        self.checksums += came
        start = self._start
        self._start += sum(self._sizes[done : done + len(came)])
        return self._value.raw[start : self._start]

    @property
    def are_complete(self) -> bool:
        """Whether the last run has come."""
        return len(self.checksums) == len(self._sizes)

    def completion(self) -> PutCompletion:
        """What is said after the last one. Raises IncompleteValue."""
        cost_s = self._waited(lambda: self._value.wait_until_final(self._deadline))
        return PutCompletion(tuple(self.checksums), cost_s)

    def _waited(self, wait: Callable[[], T]) -> T:
        """What wait gives, unless it took what was left of the time. Raises IncompleteValue."""
        was_in_time = time.monotonic() <= self._deadline
        came = wait()
        if was_in_time and time.monotonic() > self._deadline:
            raise IncompleteValue("a value did not come in time")
        return came


def _check_size(field: str, num_bytes: int, allocate_value: int) -> None:
    if num_bytes != allocate_value:
        raise InvalidInput(
            field, f"has {num_bytes} bytes", f"give {allocate_value}, as allocate_value"
        )
