"""Idle windows: times in which engines may work on what no client waits for.

A window opens while this gateway answers no question, for one request at a time. It stays closed
when a question is due soon, by the gaps between the last ones (``IdleGaps``). A question counts
from its arrival, before the gateway has retrieved its chunks.

The gateway does not know what other gateways ask; work in a window has the lowest priority, so that
their questions come first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from ragcache_core.background.idle_gaps import IdleGaps
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.scheduling.priority import BACKGROUND_BAND, QueuePosition
from ragcache_gateway.documents.removal_feed import RemovalFeed
from ragcache_gateway.engines.completion import completion_body
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.prompts.reuse_mode import ServedModel
from ragcache_gateway.tasks import BackgroundTasks
from ragcache_gateway.telemetry.metrics import Metrics

IDLE_POLL_S = 0.02


class IdleWindows:
    """Gives idle windows to callers, one at a time and in order of arrival. For one event loop."""

    def __init__(self, engines: EnginePool, metrics: Metrics) -> None:
        self._engines = engines
        self._metrics = metrics
        self._taken = asyncio.Lock()
        self._gaps = IdleGaps()
        self._num_questions = 0
        self._idle_since: float | None = None  # until the first answer no gap has a beginning
        self._delayed_since: float | None = None
        self._is_open = False

    @contextmanager
    def question(self) -> Generator[None, None, None]:
        """Count a question from its arrival to the end of its answer."""
        now = time.monotonic()
        if self._num_questions == 0 and self._idle_since is not None:
            self._gaps.record(now - self._idle_since)
        if self._is_open and self._delayed_since is None:
            self._delayed_since = now
        self._num_questions += 1
        try:
            yield
        finally:
            self._num_questions -= 1
            if self._num_questions == 0:
                self._idle_since = time.monotonic()

    @asynccontextmanager
    async def window(self, work_s: float = 0.0) -> AsyncGenerator[None, None]:
        """Wait until an engine can answer and none does; use the window for one request.

        Args:
            work_s: Predicted time of the request; 0: it can be interrupted at any time.
        """
        async with self._taken:
            while not self._may_open(work_s):  # noqa: ASYNC110  polls
                await asyncio.sleep(IDLE_POLL_S)
            self._is_open = True
            try:
                yield
            finally:
                self._is_open = False
                if self._delayed_since is not None:
                    delay_s = time.monotonic() - self._delayed_since
                    self._metrics.background_delay.inc(delay_s)
                    self._delayed_since = None

    @property
    def has_ended(self) -> bool:
        """Whether a question has arrived beside the request of the open window."""
        return self._num_questions > 0 or self._engines.in_flight > 1

    def _may_open(self, work_s: float) -> bool:
        if self._num_questions or self._engines.problem or self._engines.in_flight > 0:
            return False
        if self._idle_since is None or work_s <= 0:
            return True
        return self._gaps.may_begin(time.monotonic() - self._idle_since, work_s)


@dataclass(frozen=True, slots=True)
class IdleEngines:
    """Engines that do background work in idle windows.

    Args:
        removals: Is asked before each request which documents have lost text.
    """

    model: ServedModel
    pool: EnginePool
    windows: IdleWindows
    removals: RemovalFeed
    metrics: Metrics

    def body(self, plan: ReusePlan, token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """Make the body of a request of background work."""
        return completion_body(
            self.model,
            token_ids,
            plan,
            max_tokens=max_tokens,
            position=QueuePosition(BACKGROUND_BAND),
        )


class IdleTask(BackgroundTasks):
    """Work for idle engines that goes on while there is some."""

    def __init__(self, idle: IdleEngines) -> None:
        super().__init__()
        self._model = idle.model
        self._engines = idle.pool
        self._idle = idle.windows
        self._removals = idle.removals
        self._metrics = idle.metrics
        self._body = idle.body
        self._has_work = asyncio.Event()


def now_ms() -> int:
    """Return the Unix time in milliseconds."""
    return time.time_ns() // 1_000_000
