"""The console that commands write to, and text that is formatted for it."""

from __future__ import annotations

import unicodedata

from rich.console import Console

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
