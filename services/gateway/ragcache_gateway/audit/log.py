"""The audit log of one gateway: a queue of lines, and what writes them to the sink."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from ragcache_core.access.audit import (
    AuditEvent,
    RefusalThrottle,
    encode_line,
    throttle_source,
)
from ragcache_core.errors import Unavailable
from ragcache_gateway.audit.sink import StreamSink
from ragcache_gateway.tasks import BackgroundTasks
from ragcache_gateway.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

COMPONENT: Final = "audit log"
MAX_WAITING_BYTES: Final = 16 << 20
"""Lines that wait for a sink that fails."""
RETRY_S: Final = 1.0
STALL_S: Final = 5.0
"""A write that takes longer counts as failed."""
WRITTEN_WAIT_S: Final = 2.0
"""How long the answer to a change waits for its line."""
_CLOSE_S: Final = 3.0


class AuditLog(BackgroundTasks):
    """Records events. A failing sink loses none silently. For one event loop.

    Lines wait in memory while the sink fails. Beyond MAX_WAITING_BYTES they are counted, and the
    log gets a line with their number when the sink works again.

    Args:
        gateway: Name of this gateway in each line.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        sink: StreamSink,
        gateway: str,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._sink = sink
        self._gateway = gateway
        self._metrics = metrics
        self._clock = clock
        self._throttle = RefusalThrottle()
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._sequence = 0
        self._written = 0
        self._lost = 0
        self._error: OSError | None = None
        self._flush_began_s: float | None = None
        self._wake = asyncio.Event()
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        metrics.audit_failing.set_function(lambda: float(self.is_failing))

    def start(self) -> None:
        """Begin to write."""
        self._spawn(self._run(), "audit log")

    async def close(self) -> None:
        """Write what waits, and close the sink."""
        await super().close()
        if self._waiting or self._lost:
            self._hand_over()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.to_thread(self._sink.flush)
        except (OSError, TimeoutError) as error:
            lines = self._sequence - self._written
            log.error(  # noqa: TRY400
                "audit log: not written at the end lines=%d error=%r", lines, error
            )
        else:
            self._sink.close()

    @property
    def is_failing(self) -> bool:
        """Whether the last write failed, or has not ended for some time."""
        began = self._flush_began_s
        is_stalled = began is not None and self._clock() - began > STALL_S
        return self._error is not None or is_stalled

    def check(self) -> None:
        """Raise Unavailable while the sink fails."""
        if self.is_failing:
            problem = "it cannot be written, so the gateway changes and copies no documents"
            raise Unavailable(COMPONENT, problem)

    def record(self, event: AuditEvent) -> None:
        """Have an event written soon."""
        more: dict[str, int | str] = {}
        if (source := throttle_source(event)) is not None:
            left_out = self._throttle.admit(source, self._clock())
            if left_out is None:
                self._metrics.audit_events.labels("left_out").inc()
                return
            if left_out:
                more["left_out"] = left_out
        for part in event.parts():
            self._sequence += 1
            line = encode_line(
                part.fields(), gateway=self._gateway, sequence=self._sequence, **more
            )
            if self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
                self._lost += 1
                self._metrics.audit_events.labels("lost").inc()
                continue
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._metrics.audit_events.labels("recorded").inc()
        self._wake.set()

    async def written(self) -> None:
        """Wait until every event so far is durable, at most WRITTEN_WAIT_S."""
        if self._written < self._sequence:
            future = asyncio.get_running_loop().create_future()
            self._waiters.append((self._sequence, future))
            await asyncio.wait((future,), timeout=WRITTEN_WAIT_S)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            number = self._hand_over()
            while not await self._flush():  # noqa: ASYNC110  no disk tells that it has space
                await asyncio.sleep(RETRY_S)
            self._written = number
            for waiter in [one for one in self._waiters if one[0] <= number]:
                self._waiters.remove(waiter)
                if not waiter[1].done():
                    waiter[1].set_result(None)

    def _hand_over(self) -> int:
        """Give the sink what waits. Return the number of its last line."""
        if self._lost:
            fields = {"action": "audit.lost", "counts": {"lines": self._lost}}
            self._sequence += 1
            line = encode_line(fields, gateway=self._gateway, sequence=self._sequence)
            self._waiting.append(line)
            self._lost = 0
        self._sink.add(b"".join(self._waiting))
        self._waiting.clear()
        self._waiting_bytes = 0
        return self._sequence

    async def _flush(self) -> bool:
        """Have the sink write. Return whether it did."""
        self._flush_began_s = self._clock()
        try:
            await asyncio.to_thread(self._sink.flush)
        except OSError as error:
            if self._error is None:
                log.error(  # noqa: TRY400  a full disk needs no traceback
                    "audit log: not written, changes are refused error=%s", error
                )
            self._error = error
            return False
        finally:
            self._flush_began_s = None
        if self._error is not None:
            log.warning("audit log: written again")
        self._error = None
        return True
