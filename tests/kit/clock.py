"""Clocks that a test sets, and an event loop whose time is simulated."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class ManualClock:
    """A clock that a test sets. It also replaces the module ``time``."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ManualTime:
    """The time as a store reads it, which a test lets pass. The wall clock can be set.

    Attributes:
        now_ms: The Unix time of the wall clock.
    """

    def __init__(self, now_ms: int = 1_700_000_000_000, started_s: float = 0.0) -> None:
        self.now_ms = now_ms
        self._monotonic_s = started_s

    def pass_ms(self, milliseconds: int) -> None:
        """Let time pass."""
        self.now_ms += milliseconds
        self._monotonic_s += milliseconds / 1000

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a store."""
        return {"clock": lambda: self._monotonic_s, "wall_ms": lambda: self.now_ms}


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: the simulated clock jumps to the end of each wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits for another"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop without I/O. Its time jumps to the next timer when no task can run."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def simulate(story: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(story)


def now() -> float:
    """The simulated time in seconds."""
    return asyncio.get_running_loop().time()


async def elapse(seconds: float) -> None:
    """Let simulated time pass. All tasks run that can, and no real time passes."""
    assert isinstance(asyncio.get_running_loop(), SimulatedLoop)
    await asyncio.sleep(seconds)
