"""Reports stages as lines of JSON, so that a stage that fails costs only itself."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

NOT_BUILT = "not built"
"""Figure of a feature that the engine does not have yet."""

PREFIX = '{"stage": '
"""How each line begins; everything else on standard output is a log."""


def run_stage(name: str, work: Callable[[], dict[str, Any]]) -> bool:
    """Run a stage and print its line: its figures, or what failed, and its seconds.

    Returns:
        Whether it passed.
    """
    started = time.monotonic()
    try:
        found = {"passed": True, **work()}
    except Exception as error:
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        found = {
            "passed": False,
            "error": f"{type(error).__name__}: {error}"[:800],
            "where": f"{where.filename}:{where.lineno}",
        }
    _print(name, found, started)
    return bool(found["passed"])


def skip_stage(name: str, reason: str) -> None:
    """Print the line of a stage that this machine cannot run."""
    _print(name, {"passed": None, "skipped": reason}, time.monotonic())


def _print(name: str, found: dict[str, Any], started: float) -> None:
    seconds = round(time.monotonic() - started, 2)
    print(json.dumps({"stage": name, **found, "seconds": seconds}), flush=True)
    sys.stderr.flush()


def require(condition: bool, what: str) -> None:
    """Raise AssertionError with a text that the stage's line shows."""
    if not condition:
        raise AssertionError(what)
