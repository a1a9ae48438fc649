"""Finds damage of the SQLite file, and moves a damaged file aside.

The retriever then serves no documents until a user decides: a restored backup replaces them, or
the user removes the file that was moved aside and ingests again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
import time
from pathlib import Path

from ragcache_core.errors import Unavailable
from ragcache_retriever.store.sqlite.files.backup import (
    DAMAGED_NAME,
    LOG_SUFFIXES,
    delete_everything,
    forget_indexes,
    remove_database,
    sync_folder,
)
from ragcache_retriever.store.sqlite.schema import FILE_NAME, SCHEMA

log = logging.getLogger(__name__)

MARKER_NAME = "damaged"
"""A file of this name in the folder asks the next start to check the documents."""

_EMPTY_PART = "empty.part"
_POLL_S = 1.0
_STEP_INSTRUCTIONS = 10_000
_PAUSE_S = 0.001
"""Pause after each step, so that the check leaves disk and cores to others."""


class DocumentsDamaged(Unavailable):
    """The SQLite file cannot be read as it was written."""

    def __init__(self, problem: str) -> None:
        super().__init__("retriever", f"its documents are damaged: {problem}", retry_after_s=30.0)


def refuse_damage(folder: Path) -> None:
    """Move a file aside that was found to be damaged.

    Raises:
        DocumentsDamaged: A damaged file was moved aside, now or at an earlier start.
    """
    marker, path, aside = folder / MARKER_NAME, folder / FILE_NAME, folder / DAMAGED_NAME
    if marker.exists():
        # An earlier start may have moved the file and ended before it removed the marker.
        problem = find_damage(path, threading.Event(), is_thorough=True) if path.exists() else None
        if problem is not None:
            set_aside(folder, problem)
        marker.unlink()
    if not aside.exists():
        remove_database(aside)  # its log
    else:
        _create_empty(folder)
        raise DocumentsDamaged(
            f"they were moved to {aside}; run 'ragcache restore FILE' with a backup, or remove"
            " that file and ingest the documents again"
        )


async def until_removed(folder: Path, removed: asyncio.Event) -> None:
    """Set an event when the user has removed the file that was moved aside."""
    while (folder / DAMAGED_NAME).exists():  # noqa: ASYNC110  polls
        await asyncio.sleep(_POLL_S)
    removed.set()


def set_aside(folder: Path, problem: str) -> None:
    """Move a damaged file aside. ``refuse_damage`` then moves its log to it."""
    path, aside = folder / FILE_NAME, folder / DAMAGED_NAME
    log.error("document store: damaged file=%s error=%s moved_to=%s", path, problem, aside)
    remove_database(aside)
    os.replace(path, aside)
    sync_folder(folder)


def _create_empty(folder: Path) -> None:
    """Create the file with which the retriever starts once the damaged one is removed.

    It deletes all stored KV, because the keys of that KV follow from texts that are lost.
    """
    path, part = folder / FILE_NAME, folder / _EMPTY_PART
    if path.exists():
        return
    for suffix in LOG_SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", folder / f"{DAMAGED_NAME}{suffix}")
    forget_indexes(folder)
    remove_database(part)
    with contextlib.closing(sqlite3.connect(part, isolation_level=None)) as connection:
        connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
    delete_everything(part)
    os.replace(part, path)
    sync_folder(folder)


def find_damage(path: Path, stopped: threading.Event, *, is_thorough: bool = False) -> str | None:
    """Return the first damage of a database, or None. It reads the whole file.

    Args:
        stopped: Ends the check early. It has then found nothing.
        is_thorough: Whether it also compares the indexes of tables with their rows.
    """

    def pause() -> int:
        time.sleep(_PAUSE_S)
        return int(stopped.is_set())

    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA query_only = ON")
            connection.set_progress_handler(pause, _STEP_INSTRUCTIONS)
            check = "integrity_check" if is_thorough else "quick_check"
            found = connection.execute(f"PRAGMA {check}(1)").fetchone()
    except sqlite3.OperationalError:
        return None  # stopped, or the file is busy
    except sqlite3.DatabaseError as error:
        return str(error)
    problem = str(found[0]) if found else "no answer"
    return None if problem == "ok" or stopped.is_set() else problem
