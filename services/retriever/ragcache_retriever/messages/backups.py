"""Sends and receives backups in parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from ragcache_core.errors import InvalidInput
from ragcache_retriever.store.sqlite.files.backup import SqliteBackups
from ragcache_wire.v1 import retriever_pb2 as pb

RECEIVE_GRACE_S = 60.0
RECEIVE_BYTES_PER_S = 256 << 10
"""A backup that is received takes the grace, and the time that it needs with this rate. Another one
has to wait for its end."""


async def sent_backup(backups: SqliteBackups | None) -> AsyncIterator[pb.BackupPart]:
    """Yield the parts of a copy of all documents."""
    parts = _checked(backups).backup()
    reading = None
    try:
        while True:
            reading = asyncio.ensure_future(asyncio.to_thread(next, parts, None))
            part = await asyncio.shield(reading)
            if part is None:
                return
            yield pb.BackupPart(data=part)
    finally:
        if reading is not None:
            await asyncio.wait([reading])  # a thread cannot be cancelled
        await asyncio.to_thread(parts.close)


async def received_backup(
    backups: SqliteBackups | None, parts: AsyncIterator[pb.BackupPart]
) -> int:
    """Receive a backup for the next start, and return the number of its documents.

    Raises:
        InvalidInput: It is no backup of a retriever, or damaged.
        Unavailable: The disk refuses it.
    """
    incoming = _checked(backups).receive()
    end_s = asyncio.get_running_loop().time() + RECEIVE_GRACE_S
    try:
        async with asyncio.timeout_at(end_s) as limit:
            async for part in complete_parts(parts):
                await asyncio.to_thread(incoming.write, part)
                end_s += len(part) / RECEIVE_BYTES_PER_S
                limit.reschedule(end_s)
        return await asyncio.to_thread(incoming.finish)
    except TimeoutError as error:
        problem = f"comes with less than {RECEIVE_BYTES_PER_S >> 10} KiB a second"
        raise InvalidInput("backup", problem, "send it over a faster connection") from error
    finally:
        await asyncio.to_thread(incoming.abort)


async def complete_parts(parts: AsyncIterator[pb.BackupPart]) -> AsyncIterator[bytes]:
    """Yield the data of a backup that is restored.

    Raises:
        InvalidInput: The stream has ended before the backup.
    """
    async for part in parts:
        if part.last:
            return
        yield part.data
    raise InvalidInput("backup", "has ended early", "send all parts, and then the mark of the last")


def _checked(backups: SqliteBackups | None) -> SqliteBackups:
    if backups is None:
        raise InvalidInput(
            "spec.retriever.backend",
            "keeps its documents in a database of its own",
            "use the database's tools, such as pg_dump and pg_restore",
        )
    return backups
