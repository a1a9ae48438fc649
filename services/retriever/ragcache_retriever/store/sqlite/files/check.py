"""Checks a database in use for damage, in the background."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from pathlib import Path

_STEP_INSTRUCTIONS = 10_000
_PAUSE_S = 0.001
"""Pause after each step, so that the check leaves disk and cores to others."""


def find_damage(path: Path, stopped: threading.Event) -> str | None:
    """Return the first damage of a database, or None. It reads the whole file.

    Args:
        stopped: Ends the check early. It has then found nothing.
    """

    def pause() -> int:
        time.sleep(_PAUSE_S)
        return int(stopped.is_set())

    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA query_only = ON")
            connection.set_progress_handler(pause, _STEP_INSTRUCTIONS)
            found = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        return None  # stopped, or the file is busy
    except sqlite3.DatabaseError as error:
        return str(error)
    problem = str(found[0]) if found else "no answer"
    return None if problem == "ok" or stopped.is_set() else problem
