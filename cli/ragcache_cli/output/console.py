"""The console that commands write to, and text, JSON and bars that are formatted for it."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_UNCUT_COLUMNS = 160
"""Width without a terminal: tables in a log file are not folded."""


def make_console(*, stderr: bool = False) -> Console:
    """Make a console on standard output or standard error."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, _UNCUT_COLUMNS)
    return console


def printable(text: str) -> str:
    """Remove control characters other than line breaks and tabs.

    Documents and model output can contain escape sequences, which a terminal would execute.
    """
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def duration(seconds: float) -> str:
    """Format a duration in its two largest units: ``3h 12m``."""
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86_400, whole // 3_600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    if minutes:
        return f"{minutes}m {whole % 60}s"
    return f"{whole}s"


def print_json(value: Any) -> None:
    """Print a JSON value to standard output."""
    print(json.dumps(value, ensure_ascii=False, indent=2))


@contextmanager
def counting_bar(console: Console, title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, elsewhere nothing.

    Yields:
        A function to call with how much is done, and how much there is.
    """
    bar = Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def remake_line(collection: str, num_done: int, num_documents: int, reason: str) -> str:
    """Return the progress of a collection whose documents are prepared again.

    Args:
        reason: What has changed, like ``embedder``.
    """
    counts = f"{num_done:,} of {num_documents:,} documents"
    return f"remake of {printable(collection)}: {counts} ({printable(reason)})"
