"""Where the Lease is stored: an object that replicas read, and replace if it is unchanged."""

from __future__ import annotations

from typing import Protocol

from ragcache_core.cluster.writer_election import WriterLease
from ragcache_core.errors import RagCacheError, Unavailable


class LeaseConflict(RagCacheError):
    """Another replica has written the Lease since it was read."""


class LeaseUnavailable(Unavailable):
    """The Lease cannot be read or written."""

    def __init__(self, problem: str) -> None:
        super().__init__("retriever", f"its Lease cannot be used: {problem}")


class LeaseStore(Protocol):
    """Stores one Lease. Every method raises LeaseUnavailable if the storage does not answer."""

    async def read(self) -> WriterLease | None:
        """Return the Lease, or None if there is none."""
        ...

    async def write(self, lease: WriterLease) -> WriterLease:
        """Create or replace the Lease, and return it with its new version.

        Args:
            lease: Its version is that of the Lease to replace, or empty to create it.

        Raises:
            LeaseConflict: The stored Lease has another version.
        """
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
