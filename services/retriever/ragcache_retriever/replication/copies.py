"""Stores a copy of the writer's documents, which replace those of a replica at its next start."""

from __future__ import annotations

import asyncio
import contextlib
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
    # A task of its own that is cancelled once at most, so it can remove what it has stored.
    storing = asyncio.create_task(_store(folder, parts, epoch))
    try:
        await asyncio.shield(storing)
    except asyncio.CancelledError:
        storing.cancel()
        while not storing.done():
            with contextlib.suppress(asyncio.CancelledError):  # callers can cancel more than once
                await asyncio.wait((storing,))
        if not storing.cancelled() and storing.exception() is None:  # it had ended already
            (folder / COPY_READY).unlink(missing_ok=True)
        raise


async def _store(folder: Path, parts: AsyncIterator[bytes], epoch: int) -> None:
    opening = asyncio.create_task(asyncio.to_thread(IncomingCopy, folder, COPY_READY, epoch))
    try:
        incoming = await asyncio.shield(opening)
    except asyncio.CancelledError:
        await asyncio.wait((opening,))  # its thread goes on after a cancellation
        if opening.exception() is None:
            await asyncio.to_thread(opening.result().discard)
        raise
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
