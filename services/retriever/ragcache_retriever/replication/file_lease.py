"""A Lease in a file, for replicas on one machine."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from ragcache_core.cluster.writer_election import WriterLease
from ragcache_retriever.replication.lease_store import LeaseConflict, LeaseUnavailable


class FileLease:
    """A JSON file that a lock guards. The file's folder must exist."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> WriterLease | None:
        """See LeaseStore."""
        return await asyncio.to_thread(self._read)

    async def write(self, lease: WriterLease) -> WriterLease:
        """See LeaseStore."""
        return await asyncio.to_thread(self._write, lease)

    async def close(self) -> None:
        """See LeaseStore."""

    def _read(self) -> WriterLease | None:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LeaseUnavailable(str(error)) from error
        try:
            return WriterLease(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise LeaseUnavailable(f"{self._path} is not a Lease: {error}") from error

    def _write(self, lease: WriterLease) -> WriterLease:
        try:
            lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise LeaseUnavailable(str(error)) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self._read()
            if lease.version != ("" if before is None else before.version):
                raise LeaseConflict("another replica has written the Lease")
            written = replace(lease, version=str(int(lease.version or 0) + 1))
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(asdict(written)))
            # Readers see the whole file before or after the change.
            new.replace(self._path)
        except OSError as error:
            raise LeaseUnavailable(str(error)) from error
        finally:
            os.close(lock)
        return written
