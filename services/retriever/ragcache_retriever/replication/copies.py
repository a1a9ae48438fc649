"""Stores a copy of the writer's documents, which replace those of a replica at its next start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from ragcache_core.errors import Unavailable
from ragcache_retriever.store.sqlite.files.backup import COPY_READY, IncomingCopy


async def store_copy(folder: Path, parts: AsyncIterator[bytes]) -> None:
    """Store the parts of a copy, check it, and leave it for the next start.

    Raises:
        InvalidInput: It is damaged or not complete.
        Unavailable: It could not be written.
    """
    try:
        incoming = await asyncio.to_thread(IncomingCopy, folder, COPY_READY)
    except OSError as error:
        raise Unavailable("retriever", f"a copy cannot be stored: {error}", 5.0) from error
    try:
        async for data in parts:
            await asyncio.to_thread(incoming.write, data)
        await asyncio.to_thread(incoming.finish)
    finally:
        await asyncio.to_thread(incoming.abort)
