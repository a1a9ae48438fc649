"""Shows progress: of components as lines with a spinner, of an ingest as a bar on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.text import Text

from ragcache_cli.local.platform import ComponentEvent
from ragcache_cli.local.supervision import ProcessPhase
from ragcache_cli.output.console import printable

_STYLES = {
    ProcessPhase.READY: "green",
    ProcessPhase.UNREADY: "yellow",
    ProcessPhase.BACKOFF: "yellow",
    ProcessPhase.FAILED: "red",
}
_SHOWN = {
    ProcessPhase.STARTING: "starts",
    ProcessPhase.READY: "ready",
    ProcessPhase.UNREADY: "not ready",
    ProcessPhase.BACKOFF: "restarts",
    ProcessPhase.FAILED: "given up",
    ProcessPhase.STOPPED: "stopped",
}

LINE_S = 10.0
"""Time between two lines of an ingest's progress."""


class ProgressLines:
    """Prints one line per change of a component."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._awaited: set[str] = set()
        self._status: Status | None = None

    def report(self, event: ComponentEvent) -> None:
        """Show one event."""
        line, log_lines = describe(event)
        self._console.print(Text(line, style=_STYLES.get(event.state.phase, "")))
        for log_line in log_lines:
            self._console.print(Text(f"         | {printable(log_line)}", style="dim"))
        if event.state.phase in {ProcessPhase.READY, ProcessPhase.STOPPED, ProcessPhase.FAILED}:
            self._awaited.discard(event.component)
        else:
            self._awaited.add(event.component)
        self._show_awaited()

    @contextmanager
    def spinner(self) -> Iterator[None]:
        """Keep a last line on a terminal that names the components that are not ready."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status("starting") as self._status:
            yield
        self._status = None

    def _show_awaited(self) -> None:
        if self._status is not None and self._awaited:
            self._status.update(f"waiting for {', '.join(sorted(self._awaited))}")


class IngestProgress:
    """A bar of documents with the rate of chunks, on a terminal; elsewhere a line now and then.

    A context manager.

    Args:
        total: Number of documents.
        line_s: Time between two lines.
    """

    def __init__(self, console: Console, total: int, line_s: float = LINE_S) -> None:
        self._console = console
        self._total = total
        self._line_s = line_s
        self._done = 0
        self._bar = Progress(
            TextColumn("ingesting"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("documents"),
            TextColumn("{task.fields[chunks]:,} chunks"),
            TextColumn("{task.fields[rate]:.0f} chunks/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("ingesting", total=total, chunks=0, rate=0.0)
        self._begun = self._line_at = time.monotonic()
        self._chunks = 0

    def __enter__(self) -> Self:
        self._begun = self._line_at = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def advance(self, num_chunks: int) -> None:
        """Count one document and its chunks."""
        self._chunks += num_chunks
        self._done += 1
        self._bar.update(self._task, advance=1, chunks=self._chunks, rate=self.chunks_per_s)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._line_at >= self._line_s:
            self._line_at = now
            self._console.print(
                f"{self._done:,} of {self._total:,} documents, {self._chunks:,} chunks, "
                f"{self.chunks_per_s:.0f} chunks/s"
            )

    @property
    def chunks_per_s(self) -> float:
        """Mean rate since the beginning."""
        return self._chunks / max(time.monotonic() - self._begun, 1e-3)


def describe(event: ComponentEvent) -> tuple[str, tuple[str, ...]]:
    """Return one line about an event, and the log lines to show below it."""
    state = event.state
    line = f"{event.elapsed_s:7.1f}s {event.component:<12} {_SHOWN.get(state.phase, state.phase)}"
    if state.cause:
        line += f": {state.cause}"
    if state.phase is ProcessPhase.BACKOFF and state.deaths:
        line += f" (next try in {max(0.0, state.start_at - state.since):.1f} s)"
    if event.crash_loop and state.deaths:
        line += f"; it died {state.deaths} times in a row, see {event.log}"
    return line, event.lines
