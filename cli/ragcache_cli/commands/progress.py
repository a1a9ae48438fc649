"""Shows the progress of the parts as lines, with a spinner on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text

from ragcache_cli.local.platform import PartEvent
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


class ProgressLines:
    """Prints one line per change of a part."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._awaited: set[str] = set()
        self._status: Status | None = None

    def tell(self, event: PartEvent) -> None:
        """Show one event."""
        line, log_lines = describe(event)
        self._console.print(Text(line, style=_STYLES.get(event.state.phase, "")))
        for log_line in log_lines:
            self._console.print(Text(f"         | {printable(log_line)}", style="dim"))
        if event.state.phase in {ProcessPhase.READY, ProcessPhase.STOPPED, ProcessPhase.FAILED}:
            self._awaited.discard(event.part)
        else:
            self._awaited.add(event.part)
        self._show_awaited()

    @contextmanager
    def spinner(self) -> Iterator[None]:
        """Keep a last line on a terminal that names the parts that are not ready."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status("starting") as self._status:
            yield
        self._status = None

    def _show_awaited(self) -> None:
        if self._status is not None and self._awaited:
            self._status.update(f"waiting for {', '.join(sorted(self._awaited))}")


def describe(event: PartEvent) -> tuple[str, tuple[str, ...]]:
    """Return one line about an event, and the log lines to show below it."""
    state = event.state
    line = f"{event.elapsed_s:7.1f}s {event.part:<12} {_SHOWN.get(state.phase, state.phase)}"
    if state.cause:
        line += f": {state.cause}"
    if state.phase is ProcessPhase.BACKOFF and state.deaths:
        line += f" (next try in {max(0.0, state.start_at - state.since):.1f} s)"
    if event.crash_loop and state.deaths:
        line += f"; it died {state.deaths} times in a row, see {event.log}"
    return line, event.lines
