"""Values on their way to a store. The first bytes can go out before the last ones are computed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, final

from typing_extensions import override

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.store_api import LEASE_S, NewVariant, PutCompletion
from ragcache_kv.values.buffers import checksummed_parts

ANSWER_S = 1.0
ANSWER_SHARE = 0.2
"""Time of a put that is left for the store's replies: seconds, or a share of a short timeout."""

T = TypeVar("T")


class IncompleteValue(RagCacheError):
    """A value was not completed, or not in time. The store keeps nothing of it."""


class OutgoingValue(ABC):
    """A value that a client puts.

    Attributes:
        raw: Its bytes, one part after another. They may still be computed.
    """

    def __init__(self, raw: memoryview) -> None:
        self.raw = raw if raw.ndim == 1 and raw.format == "B" else raw.cast("B")

    @abstractmethod
    def wait_for_parts(self, done: int, deadline: float) -> Sequence[int]:
        """Wait until part ``done`` is ready.

        A caller may start again at the first part.

        Args:
            done: Number of parts that the caller already has.
            deadline: On the clock of time.monotonic.

        Returns:
            XXH3-64 of the ready parts, from part ``done`` on.

        Raises:
            IncompleteValue: The part is not ready in time, or the computation was aborted.
        """

    @abstractmethod
    def wait_until_final(self, deadline: float) -> float:
        """Wait until the value is known to be right, which may be after its last part.

        Args:
            deadline: On the clock of time.monotonic.

        Returns:
            Seconds that computing the value took; 0 if unknown.

        Raises:
            IncompleteValue: The value is not known to be right in time.
        """

    def tag(self) -> bytes:
        """Return the value's tag, after all parts are ready. Empty: the client has no key."""
        return b""


@final
class ReadyValue(OutgoingValue):
    """A value whose bytes are all ready."""

    def __init__(
        self, raw: memoryview, checksums: Sequence[int], cost_s: float = 0.0, tag: bytes = b""
    ) -> None:
        super().__init__(raw)
        self._checksums = tuple(checksums)
        self._cost_s = cost_s
        self._tag = tag

    @classmethod
    def with_checksums(
        cls, raw: memoryview, part_bytes: Sequence[int], cost_s: float = 0.0
    ) -> ReadyValue:
        """Return a value, and compute the checksums of parts of these sizes."""
        return cls(raw, [part.checksum for part in checksummed_parts(raw, part_bytes)], cost_s)

    @override
    def wait_for_parts(self, done: int, deadline: float) -> Sequence[int]:
        return self._checksums[done:]

    @override
    def wait_until_final(self, deadline: float) -> float:
        return self._cost_s

    @override
    def tag(self) -> bytes:
        return self._tag


class OutgoingRuns(Iterator[memoryview]):
    """Iterates over the bytes of an outgoing value, each time over all parts that are ready.

    A store reserves memory for at most LEASE_S after the first run. Part of the time is left for
    the store's replies, so that a slow engine is not mistaken for a slow store.

    Attributes:
        checksums: Of the parts so far.
    """

    def __init__(self, variant: NewVariant, value: OutgoingValue, deadline: float) -> None:
        """Raises InvalidInput for a value of another size than its variant."""
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
        """Wait for the next parts. Raises IncompleteValue, InvalidInput."""
        if self.are_complete:
            raise StopIteration
        done = len(self.checksums)
        ready = self._wait(lambda: self._value.wait_for_parts(done, self._deadline))
        if not 1 <= len(ready) <= len(self._sizes) - done:
            raise InvalidInput(
                "value",
                f"has {done + len(ready)} parts",
                f"give {len(self._sizes)}, as announced",
            )
        if not done:
            self._deadline = min(self._deadline, time.monotonic() + LEASE_S - ANSWER_S)
        self.checksums += ready
        start = self._start
        self._start += sum(self._sizes[done : done + len(ready)])
        return self._value.raw[start : self._start]

    @property
    def are_complete(self) -> bool:
        """Whether the last run has been returned."""
        return len(self.checksums) == len(self._sizes)

    def completion(self) -> PutCompletion:
        """Return the completion, which follows the last run. Raises IncompleteValue."""
        cost_s = self._wait(lambda: self._value.wait_until_final(self._deadline))
        return PutCompletion(tuple(self.checksums), cost_s, self._value.tag())

    def _wait(self, wait: Callable[[], T]) -> T:
        """Return the result of wait. Raises IncompleteValue if it ran past the deadline."""
        was_in_time = time.monotonic() <= self._deadline
        result = wait()
        if was_in_time and time.monotonic() > self._deadline:
            raise IncompleteValue("the value was not ready in time")
        return result


def _check_size(field: str, num_bytes: int, announced: int) -> None:
    if num_bytes != announced:
        raise InvalidInput(field, f"has {num_bytes} bytes", f"give {announced}, as announced")
