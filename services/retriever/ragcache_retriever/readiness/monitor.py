"""Keeps the reported readiness up to date while the service runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ragcache_retriever.concurrency.background import attempted

log = logging.getLogger(__name__)

PERIOD_S = 2.0

Check = Callable[[], Awaitable[str | None]]
"""Returns what is wrong, or None."""


class ReadinessMonitor:
    """Reports ready while a check passes, and its problem otherwise. It recovers by itself.

    Args:
        set_ready: Reports ready.
        set_not_ready: Reports a problem.
    """

    def __init__(
        self,
        check: Check,
        set_ready: Callable[[], Awaitable[None]],
        set_not_ready: Callable[[str], Awaitable[None]],
        period_s: float = PERIOD_S,
    ) -> None:
        self._check = check
        self._set_ready = set_ready
        self._set_not_ready = set_not_ready
        self._period_s = period_s
        self._is_ready: bool | None = None

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await attempted(log, "readiness: not reported", self.update())
            await asyncio.sleep(self._period_s)

    async def update(self) -> None:
        """Check once and report the result."""
        problem = await self._problem()
        if problem is None:
            if self._is_ready is not True:
                log.info("readiness: ready")
                await self._set_ready()
        else:
            if self._is_ready is not False:
                log.warning("readiness: not ready problem=%s", problem)
            await self._set_not_ready(problem)
        self._is_ready = problem is None

    async def _problem(self) -> str | None:
        try:
            return await self._check()
        except Exception as error:
            log.exception("readiness: the check failed")
            return f"the check failed: {error!r}"
