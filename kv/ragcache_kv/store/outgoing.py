"""Values on their way to a store, of which the last bytes need not be there when the first go."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import final

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.storing import LEASE_S, Completion, NewVariant
from ragcache_kv.store.buffers import parts_of


class Unfinished(RagCacheError):
    """A value did not become whole, or not in time; nothing of it is stored."""


class Outgoing(ABC):
    """A value that is put. raw: all of it, one part after another; one byte each, contiguous."""

    def __init__(self, raw: memoryview) -> None:
        self.raw = raw if raw.ndim == 1 and raw.format == "B" else raw.cast("B")

    @abstractmethod
    def wait(self, done: int, deadline: float) -> Sequence[int]:
        """XXH3-64 of parts that are there, from part done on: one at least, else it waits for that.

        deadline: on time.monotonic's clock. May be asked anew from the begin. Raises Unfinished.
        """

    @abstractmethod
    def finished(self, deadline: float) -> float:
        """Seconds that computing it took, 0 where unknown, when it is known to be right.

        Every part may be there before that. Raises Unfinished.
        """


@final
class Whole(Outgoing):
    """A value all of which is there. checksums: of its parts. cost_s: that computing it took."""

    def __init__(self, raw: memoryview, checksums: Sequence[int], cost_s: float = 0.0) -> None:
        super().__init__(raw)
        self._checksums = tuple(checksums)
        self._cost_s = cost_s

    @classmethod
    def summed_up(cls, raw: memoryview, part_bytes: Sequence[int], cost_s: float = 0.0) -> Whole:
        """A value with the checksums that parts of these sizes have."""
        return cls(raw, [part.checksum for part in parts_of(raw, part_bytes)], cost_s)

    def wait(self, done: int, deadline: float) -> Sequence[int]:
        """See Outgoing."""
        return self._checksums[done:]

    def finished(self, deadline: float) -> float:
        """See Outgoing."""
        return self._cost_s


class Runs(Iterator[memoryview]):
    """The bytes of an outgoing value as they come, each time as many as are there by then.

    checksums: of the parts that have come so far. deadline: for what is to come; from the first run
    on a store keeps room for the others, and not for longer than LEASE_S.
    """

    def __init__(self, variant: NewVariant, value: Outgoing, deadline: float) -> None:
        """Raises InvalidInput for a value of another size than its variant's."""
        for name, num_bytes in (
            ("value", len(value.raw)),
            ("variant.part_bytes", sum(variant.part_bytes)),
        ):
            if num_bytes != variant.info.num_bytes:
                raise InvalidInput(
                    name,
                    f"has {num_bytes} bytes",
                    f"give {variant.info.num_bytes}, as announced",
                )
        self.checksums: list[int] = []
        self.deadline = deadline
        self._sizes = variant.part_bytes
        self._value = value
        self._start = 0

    def __next__(self) -> memoryview:
        """Raises Unfinished."""
        if self.are_over:
            raise StopIteration
        done = len(self.checksums)
        came = self._value.wait(done, self.deadline)
        if not done:
            self.deadline = min(self.deadline, time.monotonic() + LEASE_S)
        self.checksums += came
        start = self._start
        self._start += sum(self._sizes[done : done + len(came)])
        return self._value.raw[start : self._start]

    @property
    def are_over(self) -> bool:
        """Whether the last run has come."""
        return len(self.checksums) == len(self._sizes)

    def completion(self) -> Completion:
        """What is said after the last one. Raises Unfinished."""
        return Completion(tuple(self.checksums), self._value.finished(self.deadline))
