"""Time the engine's forward passes, for compute costs and for the scheduler's predictions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import (
    ComputedRange,
    MeasuredPass,
    SaveJob,
    StepJobs,
    VariantSpan,
)

log = logging.getLogger("vllm.ragcache")

_MIN_PROMPT_TOKENS = 32
"""Prompt tokens of a pass that is reported. With fewer, decoding dominates the pass."""


@dataclass(frozen=True, slots=True)
class _ForwardPass:
    """A forward pass over num_tokens tokens."""

    began: DeviceEvent
    ended: DeviceEvent
    num_tokens: int

    def token_s(self) -> float:
        """Return the seconds per token; waits until the pass has ended."""
        return self.ended.seconds_since(self.began) / max(1, self.num_tokens)


class PassTimer:
    """Times passes with device events. A device error costs the measurement and nothing else.

    All tokens of one pass get an equal share of its time. PGDSF has costs of its own, predicted
    from cached and computed tokens (``ReuseCosts.prefill_token_s``).
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._computed: dict[str, list[tuple[ComputedRange, _ForwardPass]]] = {}
        self._began: DeviceEvent | None = None
        self._passes: list[tuple[StepJobs, _ForwardPass]] = []

    def begin_pass(self, *, timed: bool) -> None:
        """Begin a pass. If not timed, other work makes it longer than its tokens take."""
        self._began = self.record_event() if timed else None

    def end_pass(self, jobs: StepJobs, *, failed: bool) -> None:
        """End the pass of a step."""
        began, self._began = self._began, None
        ended = self.record_event() if jobs.num_tokens else None
        if began is None or ended is None or failed:
            return
        forward_pass = _ForwardPass(began, ended, jobs.num_tokens + jobs.recompute_tokens)
        for one in jobs.computed:
            self._computed.setdefault(one.request_id, []).append((one, forward_pass))
        if jobs.prompt_tokens >= _MIN_PROMPT_TOKENS:
            self._passes.append((jobs, forward_pass))

    def take_passes(self) -> list[MeasuredPass]:
        """Return the passes that have completed since the last call."""
        completed = []
        while self._passes and self._passes[0][1].ended.is_complete:
            jobs, one = self._passes.pop(0)
            seconds = one.ended.seconds_since(one.began)
            completed.append(MeasuredPass(jobs.work, seconds, jobs.recompute_tokens > 0))
        return completed

    def record_event(self) -> DeviceEvent | None:
        """Return an event after all work submitted so far; None after a device error."""
        try:
            return self._cache.record_event()
        except Exception:
            log.exception("worker: cannot time the forward pass")
            return None

    def cost_of(self, job: SaveJob) -> Callable[[], float]:
        """Return a function that returns the seconds to compute a value without cached tokens.

        The function returns 0 if the cost is unknown. It waits until the passes that computed the
        value have ended, so any thread may call it.
        """
        return partial(_cost_s, tuple(self._computed.get(job.request_id, ())), job.span)

    def cost_s(self, job: SaveJob) -> float:
        """Return the seconds to compute a value, 0 if unknown. Call it after the value was read."""
        try:
            return self.cost_of(job)()
        except Exception:
            log.exception("worker: cannot measure the cost of a variant")
            return 0.0

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended."""
        self._computed.pop(request_id, None)


def _cost_s(computed: Iterable[tuple[ComputedRange, _ForwardPass]], span: VariantSpan) -> float:
    tokens, seconds = 0, 0.0
    for one, forward_pass in computed:
        overlap = min(one.end, span.end) - max(one.first, span.start)
        if overlap > 0:
            tokens += overlap
            seconds += overlap * forward_pass.token_s()
    return seconds / tokens * (span.end - span.start) if tokens else 0.0
