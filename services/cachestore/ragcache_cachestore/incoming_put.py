"""A value that a client is putting: allocated memory, filled by the client, then verified."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from ragcache_cachestore.storage.checksums import PartChecksums
from ragcache_cachestore.storage.memory_tier import MemoryTier
from ragcache_cachestore.storage.tier_space import TierCopy
from ragcache_core.storage.extents import Extent
from ragcache_core.store_api import Ack, NewVariant, PutCompletion, PutOutcome
from ragcache_kv.values.buffers import slice_views

COMMIT_TIMEOUT_S = 60.0


class PutTarget(Protocol):
    """The part of a store that an incoming put needs."""

    memory_tier: MemoryTier

    def commit(
        self, incoming: IncomingPut, completion: PutCompletion, ack: Ack, timeout_s: float
    ) -> PutOutcome:
        """Verify a put and make it visible."""

    def abort(self, incoming: IncomingPut, quarantine_s: float) -> None:
        """Release the memory of a put."""


class IncomingPut:
    """One put, from the allocation of its memory to commit or abort. For one thread at a time.

    As a context manager it aborts the put unless it was committed.

    Attributes:
        new: The variant that is put.
        copy: The allocated memory.
        delete_sequence: The last delete that the computation has seen.
        sums: Checksums of the bytes that are known to be written.
    """

    def __init__(
        self, target: PutTarget, new: NewVariant, copy: TierCopy, delete_sequence: int
    ) -> None:
        self._target = target
        self.new = new
        self.copy = copy
        self.delete_sequence = delete_sequence
        self.sums = PartChecksums(new.part_bytes)
        self._ended = False

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where in the memory tier the client must write the value."""
        return self.copy.extents

    @property
    def views(self) -> list[memoryview]:
        """One writable view for each extent."""
        return self._target.memory_tier.views(self.copy.extents)

    def add_checksums_up_to(self, num_bytes: int) -> None:
        """Add the checksums of the value's first num_bytes, which are written."""
        start, length = self.sums.num_bytes, num_bytes - self.sums.num_bytes
        for piece in slice_views(self.views, start, length):
            self.sums.add(piece)

    def commit(
        self,
        completion: PutCompletion,
        ack: Ack = Ack.ACCEPTED,
        timeout_s: float = COMMIT_TIMEOUT_S,
    ) -> PutOutcome:
        """Verify every part, then make the value visible. With Ack.DURABLE, wait for its write.

        Raises:
            InvalidInput: A part does not match its checksum.
            Unavailable: The value is not on disk within timeout_s. It stays accepted.
        """
        assert not self._ended
        self._ended = True
        return self._target.commit(self, completion, ack, timeout_s)

    def abort(self, quarantine_s: float = 0.0) -> None:
        """Release the memory, unless the put has ended.

        Args:
            quarantine_s: How long to keep the pages from other puts, because the client may not
                have noticed yet.
        """
        if not self._ended:
            self._ended = True
            self._target.abort(self, quarantine_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()
