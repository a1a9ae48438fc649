"""A bar that counts what is done of a long operation, on a terminal alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


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
