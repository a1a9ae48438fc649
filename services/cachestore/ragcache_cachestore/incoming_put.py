"""A value on its way in: room in the memory_tier, filled by whoever puts it, then checked and shown."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from ragcache_cachestore.storage.checksums import PartChecksums
from ragcache_cachestore.storage.tier_space import TierCopy
from ragcache_core.storage.extents import Extent
from ragcache_core.store_api import Ack, NewVariant, PutCompletion, PutOutcome
from ragcache_kv.values.buffers import slice_views

if TYPE_CHECKING:
    from ragcache_cachestore.store import Store

COMMIT_TIMEOUT_S = 60.0


class IncomingPut:
    """One put between begin and end. As a context manager it is aborted unless it was committed.

    new: what is put. delete_sequence: deletes up to there were seen by it. sums: of the bytes that
    are known to have been written. For one thread at a time.
    """

    def __init__(self, store: Store, new: NewVariant, copy: TierCopy, delete_sequence: int) -> None:
        self._store = store
        self.new = new
        self.copy = copy
        self.delete_sequence = delete_sequence
        self.sums = PartChecksums(new.part_bytes)
        self._ended = False

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where in the memory_tier the value is to be written."""
        return self.copy.extents

    @property
    def views(self) -> list[memoryview]:
        """The bytes there, one writable view for each extent."""
        return self._store.memory_tier.views(self.copy.extents)

    def add_checksums_up_to(self, num_bytes: int) -> None:
        """So many bytes, from the value's begin, have been written."""
        for piece in slice_views(self.views, self.sums.num_bytes, num_bytes - self.sums.num_bytes):
            self.sums.add(piece)

    def commit(
        self,
        completion: PutCompletion,
        ack: Ack = Ack.ACCEPTED,
        timeout_s: float = COMMIT_TIMEOUT_S,
    ) -> PutOutcome:
        """Check every part, then show the value, whole; with Ack.DURABLE wait for its write.

        Raises InvalidInput for a part that does not match its checksum; Unavailable if it could not
        be written within timeout_s, where it stays accepted.
        """
        assert not self._ended
        self._ended = True
        return self._store.commit(self, completion, ack, timeout_s)

    def abort(self, quarantine_s: float = 0.0) -> None:
        """Leave nothing, if it was not committed.

        quarantine_s: how long to keep its pages from others, where its writer may not have noticed yet.
        """
        if not self._ended:
            self._ended = True
            self._store.abort(self, quarantine_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()
