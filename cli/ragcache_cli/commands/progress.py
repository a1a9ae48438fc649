"""What the parts do while a platform starts and runs, as lines; on a terminal with a spinner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text

from ragcache_cli.commands.console import printable
from ragcache_cli.local.platform import PartEvent
from ragcache_cli.local.supervision import Phase

_STYLES = {
    Phase.READY: "green",
    Phase.UNREADY: "yellow",
    Phase.BACKOFF: "yellow",
    Phase.FAILED: "red",
}
_SHOWN = {
    Phase.STARTING: "starts",
    Phase.READY: "ready",
    Phase.UNREADY: "not ready",
    Phase.BACKOFF: "restarts",
    Phase.FAILED: "given up",
    Phase.STOPPED: "stopped",
}


class ProgressLines:
    """A line per change of a part."""

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
        if event.state.phase in {Phase.READY, Phase.STOPPED, Phase.FAILED}:
            self._awaited.discard(event.part)
        else:
            self._awaited.add(event.part)
        self._show_awaited()

    @contextmanager
    def spinner(self) -> Iterator[None]:
        """On a terminal, keep a last line that says what is waited for; nowhere else."""
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
    """One line about an event, and the log lines to show below it."""
    state = event.state
    line = f"{event.elapsed_s:7.1f}s {event.part:<12} {_SHOWN.get(state.phase, state.phase)}"
    if state.cause:
        line += f": {state.cause}"
    if state.phase is Phase.BACKOFF and state.deaths:
        line += f" (next try in {max(0.0, state.start_at - state.since):.1f} s)"
    if event.crash_loop and state.deaths:
        line += f"; it died {state.deaths} times in a row, see {event.log}"
    return line, event.lines
