"""The console that commands write to, and text that is safe to put on it."""

from __future__ import annotations

import unicodedata

from rich.console import Console

_UNCUT_COLUMNS = 160
"""Width without a terminal: a log has no edge at which a table would have to be folded."""


def make_console(*, stderr: bool = False) -> Console:
    """A console on standard output, or on standard error."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, _UNCUT_COLUMNS)
    return console


def printable(text: str) -> str:
    """Text without control characters but line breaks and tabs.

    Documents and models can hold escape sequences, which a terminal would obey.
    """
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
