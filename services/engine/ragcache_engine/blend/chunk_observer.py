"""See what chunks took from those before them, while the engine has nothing else to do.

That takes a pass over each chunk, too much for the first visitor to wait for. So it is done when
the request has ended: vLLM keeps its blocks for so long, and goes on stepping.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ragcache_core.blend.observation import ChunkObservation
from ragcache_core.blend.prefix_chunks import AttendedChunk
from ragcache_engine.protocol.messages import ObserveJob, SaveJob
from ragcache_wire.trace_context import metadata
from ragcache_wire.tracing import Kind, Tracer

if TYPE_CHECKING:
    from ragcache_engine.blend.attention import AttentionObserver

log = logging.getLogger("vllm.ragcache")

Keep = Callable[[SaveJob, ChunkObservation, float], None]


@dataclass(slots=True)
class _Watching:
    job: ObserveJob
    since: float
    left: list[int]


class ChunkObserver:
    """Observes one chunk a step. For the worker's main thread only.

    keep(save, observation, seconds): takes what was seen of a variant that was saved. deadline_s:
    after that without anything seen a request's blocks are let go. tracer: of what is part of a
    trace.
    """

    def __init__(
        self,
        observer: AttentionObserver,
        max_tokens: int,
        keep: Keep,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        self._observer = observer
        self._max_tokens = max_tokens
        self._keep = keep
        self._deadline_s = deadline_s
        self._clock = clock
        self._tracer = tracer or Tracer()
        self._watchings: list[_Watching] = []

    def start(self, job: ObserveJob) -> None:
        """Observe what was saved of a request."""
        places = [p for p in sorted(job.saves) if len(job.segments[p]) <= self._max_tokens]
        self._watchings.append(_Watching(job, self._clock(), places))

    def advance(self, *, idle: bool) -> set[str]:
        """Observe a chunk if the engine is idle; returns the requests that are done with."""
        if idle and self._watchings and self._watchings[0].left:
            watching = self._watchings[0]
            try:
                place = watching.left.pop(0)
                parent = metadata(watching.job.saves[place].traceparent)
                with self._tracer.below("observe", parent, Kind.INTERNAL, place=place):
                    self._observe(watching.job, place)
                watching.since = self._clock()
            except Exception:
                log.exception("chunks of request %s are not observed", watching.job.request_id)
                watching.left.clear()
        late = self._clock() - self._deadline_s
        done = [w for w in self._watchings if not w.left or w.since <= late]
        self._watchings = [w for w in self._watchings if w.left and w.since > late]
        return {watching.job.request_id for watching in done}

    def let_go(self) -> None:
        """Give up what has not been observed yet."""
        for watching in self._watchings:
            watching.left.clear()

    def _observe(self, job: ObserveJob, place: int) -> None:
        began = self._clock()
        segments = job.segments[: place + 1]
        chunk = segments[-1]
        seen = self._observer.observe(job.token_ids[: chunk.stop], job.blocks, chunk, segments)
        mass: torch.Tensor = seen.mass.sum(0)
        attended = tuple(
            AttendedChunk(job.chunks[j], len(segments[j]), max(0.0, float(mass[j])))
            for j in range(1, place)
        )
        observation = ChunkObservation(
            attended, max(0.0, float(mass[place])), tuple(seen.influence.tolist())
        )
        self._keep(job.saves[place], observation, self._clock() - began)
