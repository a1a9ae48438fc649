"""Observe how chunks attend to the chunks before them, mostly while the engine is idle.

An observation takes one pass over each chunk, which is too much to delay the first request for it.
So the worker observes after the request has ended: vLLM keeps its blocks for so long, and keeps
stepping. A pass ends early, between two layers, when a request arrives.

A busy engine is never idle, and would know nothing of its chunks. So it observes a sample: after
each observation it rests until observations took BUSY_SHARE of its time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragcache_core.blend.observation import ChunkObservation
from ragcache_core.blend.prefix_overlap import AttendedChunk
from ragcache_engine.blend.ranks import PassInterrupted
from ragcache_engine.kv_cache.host_memory import HostCopy
from ragcache_engine.protocol.messages import ObserveJob, SaveJob
from ragcache_wire.tracing import SpanKind, Tracer, metadata

if TYPE_CHECKING:
    from ragcache_engine.blend.components import BlendComponents

log = logging.getLogger("vllm.ragcache")

BUSY_SHARE = 0.02
"""Largest share of a busy engine's time that observations take."""

FIRST_REST_S = 5.0
"""Time for which an engine is busy before it observes beside its work."""

SaveObservation = Callable[[SaveJob, ChunkObservation, float], None]
"""Saves the observation of a variant, with the seconds that it took."""


@dataclass(slots=True)
class _ObservationTask:
    """One request's chunks.

    Attributes:
        segments: Indices of the segments that are left to observe.
        measured: The first of them while the device measures it: the attention of its tokens on
            each segment, and their influence; and when the measurement began.
    """

    job: ObserveJob
    last_progress: float
    segments: list[int]
    measured: tuple[HostCopy, HostCopy, float] | None = None


class ChunkObserver:
    """Observes one chunk a step. Only the worker's main thread may use it.

    With several ranks no clock and no arrival may decide about a pass, because ranks differ in
    them. Then a pass is not interrupted, and the scheduler alone releases blocks early.

    Args:
        blend: Measures attention. Chunks longer than one of its passes are not observed.
        save: Saves each observation.
        deadline_s: Time without progress after which a request's blocks are released.
        clock: Returns seconds.
        count_arrivals: Returns how many requests have arrived so far. A pass ends when it changes.
        tracer: Traces the requests that are part of a trace.
    """

    def __init__(
        self,
        blend: BlendComponents,
        save: SaveObservation,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
        count_arrivals: Callable[[], int] | None = None,
    ) -> None:
        self._observer = blend.observer
        self._ranks = blend.recomputer.ranks
        self._count_arrivals = count_arrivals if self._ranks.num_ranks == 1 else None
        self._max_tokens = blend.recomputer.max_tokens
        self._save = save
        self._deadline_s = deadline_s if self._ranks.num_ranks == 1 else float("inf")
        self._clock = clock
        self._tracer = tracer or Tracer()
        self._tasks: list[_ObservationTask] = []
        # When the next observation beside other work may begin. None: none has been wanted yet.
        self._rested_s: float | None = None

    def start(self, job: ObserveJob) -> None:
        """Queue the chunks of a request that were saved."""
        segments = [i for i in sorted(job.saves) if len(job.segments[i]) <= self._max_tokens]
        self._tasks.append(_ObservationTask(job, self._clock(), segments))

    def advance(self, *, idle: bool, num_arrivals: int = 0, beside_work: bool = True) -> set[str]:
        """Observe one chunk if there is time; return the requests whose blocks are free.

        Args:
            idle: Whether the step has nothing else to do.
            num_arrivals: Requests that had arrived when the step began. A later one waits for this
                step to end.
            beside_work: Whether a busy engine may observe in this step.
        """
        first = self._tasks[0] if self._tasks else None
        if first is not None and first.segments and first.measured is None:
            if idle:
                self._observe_next(first, lambda: self._request_waits(num_arrivals))
            elif beside_work and self._has_rested():
                # Requests arrive all the time, so none of them ends it.
                self._observe_next(first, lambda: False)
        for task in self._tasks:
            self._save_measured(task)
        expired = self._clock() - self._deadline_s
        done = [t for t in self._tasks if not t.segments or t.last_progress <= expired]
        self._tasks = [t for t in self._tasks if t.segments and t.last_progress > expired]
        return {task.job.request_id for task in done}

    def abort(self) -> None:
        """Drop the chunks that have not been observed yet."""
        for task in self._tasks:
            task.segments, task.measured = [], None

    def _request_waits(self, num_arrivals: int) -> bool:
        return self._count_arrivals is not None and self._count_arrivals() != num_arrivals

    def _has_rested(self) -> bool:
        now = self._clock()
        if self._rested_s is None:
            self._rested_s = now + FIRST_REST_S
        return now >= self._rested_s

    def _observe_next(self, task: _ObservationTask, must_stop: Callable[[], bool]) -> None:
        index = task.segments[0]
        try:
            parent = metadata(task.job.saves[index].traceparent)
            with self._tracer.start_child_of("observe", parent, SpanKind.INTERNAL, segment=index):
                self._measure(task, index, must_stop)
        except PassInterrupted:
            log.debug("chunk observer: interrupted by a request")
        except Exception:
            log.exception("chunk observer: observation failed request=%s", task.job.request_id)
            task.segments.clear()

    def _measure(self, task: _ObservationTask, index: int, must_stop: Callable[[], bool]) -> None:
        """Submit the measurement of a chunk to the device."""
        began, job = self._clock(), task.job
        segments = job.segments[: index + 1]
        chunk = segments[-1]
        attention = self._observer.observe(
            job.token_ids[: chunk.stop], job.blocks, chunk, segments, must_stop
        )
        task.measured = HostCopy(attention.mass.sum(0)), HostCopy(attention.influence), began

    def _has_measured(self, influence: HostCopy) -> bool:
        """Tell whether a chunk is measured. With several ranks, wait for it in this step."""
        if self._ranks.num_ranks > 1:
            influence.wait()
        return influence.is_complete

    def _save_measured(self, task: _ObservationTask) -> None:
        """Save the observation of a task's first chunk, if the device has measured it."""
        if task.measured is None or not self._has_measured(task.measured[1]):
            return
        (mass, influence, began), task.measured = task.measured, None
        index = task.segments.pop(0)
        task.last_progress = now = self._clock()
        self._rested_s = max(now + (now - began) / BUSY_SHARE, self._rested_s or 0.0)
        try:
            if not self._ranks.is_first:
                return
            job, shares = task.job, mass.take().tolist()
            attended = tuple(
                AttendedChunk(job.chunks[j], len(job.segments[j]), max(0.0, shares[j]))
                for j in range(1, index)
            )
            observation = ChunkObservation(
                attended, max(0.0, shares[index]), tuple(influence.take().tolist())
            )
            self._save(job.saves[index], observation, now - began)
        except Exception:
            log.exception("chunk observer: observation failed request=%s", task.job.request_id)
            task.segments.clear()
