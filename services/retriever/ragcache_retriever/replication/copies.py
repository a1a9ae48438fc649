"""Stores a copy of the writer's documents, which the next start takes over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO, Final

from ragcache_core.errors import Unavailable

PART_NAME: Final = "restore.part"
READY_NAME: Final = "restore.ready"
"""A file of this name replaces the documents when the store is opened."""


async def store_copy(folder: Path, parts: AsyncIterator[bytes]) -> None:
    """Store the parts of a copy, check it, and leave it for the next start.

    Raises:
        Unavailable: It is damaged, not complete, or could not be written.
    """
    part = folder / PART_NAME
    try:
        with await asyncio.to_thread(part.open, "wb") as file:
            async for data in parts:
                await asyncio.to_thread(file.write, data)
            await asyncio.to_thread(_synchronize, file)
        await asyncio.to_thread(_check, part)
        await asyncio.to_thread(part.replace, folder / READY_NAME)
    except (OSError, sqlite3.Error) as error:
        raise Unavailable("retriever", f"the copy failed: {error}", 5.0) from error


def _synchronize(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _check(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as copy:
        [(result,)] = copy.execute("PRAGMA quick_check(1)").fetchall()
    if result != "ok":
        raise sqlite3.DatabaseError(f"it is damaged: {result}")
