"""Takes over the store's answers to lookups, within one time limit per scheduling step."""

from __future__ import annotations

import logging
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace

from ragcache_core.identity.variant import Miss
from ragcache_engine.protocol.messages import miss_reason
from ragcache_engine.scheduler.lookup import LookupExecutor, LookupResult
from ragcache_engine.scheduler.request import RequestState
from ragcache_wire.settings import EngineSettings

log = logging.getLogger("vllm.ragcache")


class LookupCompletion:
    """Completes the lookups of requests. Not thread-safe."""

    def __init__(self, settings: EngineSettings, lookups: LookupExecutor) -> None:
        self._settings = settings
        self._lookups = lookups
        self._wait_left_s = settings.lookup_wait_s

    def begin_step(self) -> None:
        """Renew the time that all requests together may wait in one step."""
        self._wait_left_s = self._settings.lookup_wait_s

    def try_complete(self, request: RequestState) -> bool:
        """Store the answer in the request. Return False if the lookup is still in flight."""
        if request.next_lookup is not None:
            self._repeat_when_due(request)
            return False
        started = time.monotonic()
        try:
            completed = self._take_answer(request)
        finally:
            # Waits count whether they end with an answer or not.
            self._wait_left_s -= time.monotonic() - started
        if completed:
            _record_first_miss(request)
            if request.handoff is not None:
                request.end_handoff()
        return completed

    def _repeat_when_due(self, request: RequestState) -> None:
        """Ask the store again for what another engine computes."""
        now = time.monotonic()
        if request.next_lookup is not None and now >= request.next_lookup:
            request.lookup = self._lookups.start_planned(
                request.plan, request.segments, request.traceparent, request.blended_pieces
            )
            request.lookup_started, request.next_lookup = now, None

    def _take_answer(self, request: RequestState) -> bool:
        assert request.lookup is not None
        # While another engine computes the prompt, this engine's other requests must not wait.
        wait_s = 0.0 if request.handoff is not None else max(0.0, self._wait_left_s)
        try:
            result = request.lookup.result(timeout=wait_s)
        except FutureTimeoutError:
            if time.monotonic() - request.lookup_started < self._settings.lookup_deadline_s:
                return False
            request.lookup.cancel()
            return _complete_without_answer(request, "lookup timed out")
        except Exception as error:
            # Usually an outage. vLLM would end on any exception.
            log.warning("lookup: failed request=%s error=%s", request.plan.request, error)
            return _complete_without_answer(request, "store unavailable")
        return self._adopt_answer(request, result)

    def _adopt_answer(self, request: RequestState, result: LookupResult) -> bool:
        request.segments = result.segments
        if result.may_complete_later and _schedule_repeat(request, answered=True):
            return False
        answer = result.answer
        request.stored = answer.by_key()
        request.blend = result.blend if self._lookups.blending_enabled else None
        # The gateway chose the chunks before this answer, so deletes since then count, too.
        planned_at_ms = request.plan.planned_at_ms
        request.as_of = {
            shard: replace(as_of, planned_at_ms=planned_at_ms)
            for shard, as_of in answer.as_of.items()
        }
        request.misses = {
            named.variant: variants.miss
            for named, variants in zip(request.segments, answer.variants, strict=False)
            if variants.miss is not None
        }
        return True


def _complete_without_answer(request: RequestState, miss: str) -> bool:
    if _schedule_repeat(request, answered=False):
        return False
    request.stored, request.record.miss = {}, miss
    return True


def _schedule_repeat(request: RequestState, *, answered: bool) -> bool:
    """Schedule another lookup while another engine computes the prompt. Return False if none."""
    handoff = request.handoff
    if handoff is None:
        return False
    now = time.monotonic()
    request.next_lookup = handoff.record_missing(now) if answered else handoff.record_no_answer(now)
    if request.next_lookup is None and answered:
        request.record.miss = "handoff timed out"
    return request.next_lookup is not None


def _record_first_miss(request: RequestState) -> None:
    """Record why the first missing variant is missing. What comes after it is of no use."""
    missing = request.segments[len(request.exact_chain) :]
    if missing and not request.record.miss:
        request.record.miss = miss_reason(request.misses.get(missing[0].variant, Miss.NEVER_STORED))
