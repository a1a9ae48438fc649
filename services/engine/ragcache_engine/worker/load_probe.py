"""Measures loads that requests declined, while the engine has nothing else to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ragcache_engine.protocol.messages import LoadJob, LoadOutcome, ProbeOutcome
from ragcache_engine.worker.loader import ValueLoader

_PREFIX = "probe "
"""Begins the loader's ids of probes, because vLLM cancels the loads of a request that has ended."""

_REST_RATIO = 15.0
"""Seconds without a probe after each second of one: probes take a sixteenth of the idle time."""

_FIRST_LIMIT = 8


class LoadProbe:
    """Makes one declined load at a time. Only the worker's main thread may use it.

    A request that arrives ends a running probe. The next one loads half as many values then, so
    that it fits into a shorter idle time.

    Args:
        loader: Makes the loads.
        clock: Returns seconds.
    """

    def __init__(self, loader: ValueLoader, clock: Callable[[], float] = time.monotonic) -> None:
        self._loader = loader
        self._clock = clock
        self._waiting: LoadJob | None = None
        self._running: LoadJob | None = None
        self._limit = _FIRST_LIMIT  # values
        self._cancelled = False
        self._rests_until = 0.0
        self._started = 0.0
        self._outcomes: list[ProbeOutcome] = []
        self._released: set[str] = set()

    def offer(self, job: LoadJob) -> None:
        """Keep a job for the next idle time, in place of an earlier one."""
        self.abort()
        self._waiting = job

    def abort(self) -> None:
        """Drop the job that waits, so that vLLM gets its blocks back."""
        if self._waiting is not None:
            self._released.add(self._waiting.request_id)
            self._waiting = None

    def advance(self, *, idle: bool, wanted: bool) -> None:
        """Begin a probe if the engine is idle, or end it if it no longer is.

        Args:
            idle: Whether the worker has nothing else to do.
            wanted: Whether a request runs or waits.
        """
        if self._running is not None:
            if wanted and not self._cancelled:
                self._cancelled = True
                self._loader.cancel(_PREFIX + self._running.request_id)
        elif self._waiting is not None and idle and not wanted:
            job, self._waiting = self._waiting, None
            if self._clock() < self._rests_until:
                self._released.add(job.request_id)
                return
            spans = job.spans[: self._limit]
            self._running = job = replace(job, spans=spans, end=spans[-1].end)
            self._started, self._cancelled = self._clock(), False
            self._loader.start([replace(job, request_id=_PREFIX + job.request_id)])

    def is_probe(self, name: str) -> bool:
        """Tell whether this is the loader's id of the running probe."""
        return self._running is not None and name == _PREFIX + self._running.request_id

    def finish(self, outcome: LoadOutcome) -> bool:
        """Take the outcome of a load; return False if the load is no probe."""
        job = self._running
        if job is None or not self.is_probe(outcome.request_id):
            return False
        self._running = None
        self._limit = max(1, self._limit // 2) if self._cancelled else 2 * self._limit
        # A thread of the loader may read until the deadline, even if nothing waits for it.
        ends = self._started + job.deadline_s if outcome.reason else self._clock()
        self._rests_until = max(ends, self._clock() + _REST_RATIO * outcome.seconds)
        outcome = replace(outcome, request_id=job.request_id)
        self._outcomes.append(ProbeOutcome(outcome, tuple(span.variant for span in job.spans)))
        self._released.add(job.request_id)
        return True

    def take_outcomes(self) -> list[ProbeOutcome]:
        """Return the outcomes since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_released(self) -> set[str]:
        """Return the requests whose blocks are no longer kept for a probe."""
        released, self._released = self._released, set()
        return released
