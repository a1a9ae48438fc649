"""Stores a copy of the writer's documents, which replace those of a replica at its next start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from ragcache_core.errors import Unavailable
from ragcache_retriever.store.sqlite.files.backup import COPY_READY, IncomingCopy


async def store_copy(folder: Path, parts: AsyncIterator[bytes], epoch: int) -> None:
    """Store the parts of a copy, check it, and leave it for the next start.

    A cancelled call leaves no copy. The replica would acknowledge further changes, and lose them
    when the next start installs the copy.

    Args:
        epoch: Of the writer. A copy that ends before it is not the writer's.

    Raises:
        InvalidInput: It is damaged, not complete, or not of this writer.
        Unavailable: It could not be written.
    """
    try:
        incoming = await asyncio.to_thread(IncomingCopy, folder, COPY_READY, epoch)
    except OSError as error:
        raise Unavailable("retriever", f"a copy cannot be stored: {error}", 5.0) from error
    finishing: asyncio.Task[int] | None = None
    try:
        async for data in parts:
            await asyncio.to_thread(incoming.write, data)
        finishing = asyncio.create_task(asyncio.to_thread(incoming.finish))
        await asyncio.shield(finishing)
    except BaseException:
        if finishing is not None:
            await asyncio.wait((finishing,))  # its thread goes on after a cancellation
        await asyncio.to_thread(incoming.discard)
        raise
