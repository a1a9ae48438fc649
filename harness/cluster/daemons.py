"""Long-running programs of a cluster: started with a log, watched, ended by their own pid."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.packages import command


class NotReady(RuntimeError):
    """A part of the cluster ended or did not become ready in time; the message has its log."""


class Daemon:
    """One running program.

    The kernel kills it when the *thread* that started it ends, however that happens, so start
    daemons from a thread that lives as long as they should (pytest's main thread does).
    """

    def __init__(self, name: str, argv: Sequence[str | Path], log: Path) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [command("setpriv"), "--pdeathsig", "SIGKILL", "--", *map(str, argv)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A Ctrl-C at the terminal is for the test, which ends its daemons in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, ready: Callable[[], bool], what: str, limit_s: float) -> None:
        """Wait for a condition that this daemon brings about.

        Raises NotReady with the end of the log if the daemon ends or limit_s passes first.
        """
        deadline = time.monotonic() + limit_s
        while not ready():
            if not self.is_running:
                raise NotReady(f"{self.name} ended before {what}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise NotReady(f"{self.name}: no {what} in {limit_s:g} s:\n{self.log_tail()}")
            time.sleep(0.1)

    def log_tail(self, size: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-size:]

    def stop(self, patience_s: float = 60) -> None:
        """End it: politely, then not."""
        if self.is_running:
            self._process.terminate()
        try:
            self._process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
