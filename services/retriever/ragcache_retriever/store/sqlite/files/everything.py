"""Prepares a database that replaces another one, whose later changes it does not know."""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import time
from pathlib import Path

from ragcache_core.store_api import ID_BYTES


def delete_everything(path: Path, replaced: Path | None) -> None:
    """Put a delete of all stored KV into a database, and begin a new epoch.

    Removals are numbered from the start again. A gateway that sees a lower number than its last one
    drops all that it keeps of documents. Followers that see the new epoch take a copy.

    Args:
        path: The new database, which no process uses.
        replaced: The one that it replaces, which may be missing or damaged.
    """
    sequence, epoch = _last_change(replaced)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM outbox")
        connection.execute("DELETE FROM sqlite_sequence WHERE name = 'outbox'")
        connection.execute(
            "INSERT INTO outbox (id, collection, document, names_document, everything,"
            " token_digests, removed_unix_ms, claimed_until_ms)"
            " VALUES (?, '', '', 0, 1, x'', ?, 0)",
            (secrets.token_bytes(ID_BYTES), int(time.time() * 1000)),
        )
        connection.execute("DELETE FROM changes")
        connection.execute(
            "UPDATE state SET sequence = max(sequence, ?) + 1, epoch = max(epoch, ?) + 1",
            (sequence, epoch),
        )
        connection.execute("COMMIT")


def _last_change(path: Path | None) -> tuple[int, int]:
    """Return the sequence number and the epoch of the last change, as far as they can be read."""
    if path is None or not path.exists():
        return 0, 0
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            sequence, epoch = connection.execute("SELECT sequence, epoch FROM state").fetchone()
    except (sqlite3.Error, TypeError):
        return 0, 0
    return int(sequence), int(epoch)
