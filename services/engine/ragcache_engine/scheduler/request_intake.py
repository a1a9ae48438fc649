"""Checks new requests, starts their lookups, and counts the plans that it refuses."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

from ragcache_core.cluster.handoff_polling import HandoffPolling
from ragcache_core.errors import RagCacheError
from ragcache_core.plan.reuse_plan import NO_REUSE, Action, Handoff, ReusePlan
from ragcache_core.plan.segments import (
    PIECE_TOKENS,
    NamedSegment,
    blended_pieces,
    checked_segments,
    handoff_segments,
    plain_domain,
)
from ragcache_core.plan.signature import SIGNATURE_FIELD, is_timely, signed_until_s
from ragcache_engine.protocol.context import EngineContext
from ragcache_engine.scheduler.lookup import LookupExecutor
from ragcache_engine.scheduler.request import NewRequest, RequestState

log = logging.getLogger("vllm.ragcache")

PLAN_FIELD = "ragcache"
"""Name of the plan within a request's ``kv_transfer_params``."""

LOG_INTERVAL_S: Final = 10.0
"""At most one log line in this time: any client of the engine can send refused plans."""
_MAX_ERROR_CHARS: Final = 300
"""An error may repeat what the client sent."""

_LOG_NO_LOOKUP: Final = "scheduler: no lookup started, prompt is computed request=%s"


class RequestIntake:
    """Turns vLLM's new requests into ``RequestState``. No exception leaves its methods."""

    def __init__(self, engine: EngineContext, lookups: LookupExecutor) -> None:
        self._settings = engine.settings
        self._space = engine.space
        self._lookups = lookups
        self._refused = RefusedPlans()
        if self._settings.signing_key_file is None:
            log.warning(
                "scheduler: RAGCACHE_SIGNING_KEY_FILE is not set, so any client can send a plan"
                " for any access domain"
            )

    def accept(self, new: NewRequest) -> RequestState | None:
        """Start a request's lookup. Return None if the connector leaves the request to vLLM."""
        request_id, token_ids = new.request_id, new.token_ids
        fields = new.params if isinstance(new.params, dict) else {}
        plan_text = fields.get(PLAN_FIELD)
        if plan_text is None or plan_text == NO_REUSE:
            reuses = plan_text is None and self._settings.plain_prefixes and new.cacheable
            if reuses and len(token_ids) >= PIECE_TOKENS:
                return self._accept_plain(new)
            return None
        try:
            signature = fields.get(SIGNATURE_FIELD)
            if reason := self._check_signature(plan_text, token_ids, signature):
                self._refused.add(request_id, reason)
                return None
            plan = ReusePlan.decode(plan_text)
            segments = checked_segments(plan, token_ids, self._space)
        except Exception as error:
            # A client may put anything into a plan, and vLLM would end on an exception.
            self._refused.add(request_id, RefusalReason.INVALID, error)
            return None
        try:
            return self._accept_planned(new, plan, segments)
        except Exception:
            log.exception(_LOG_NO_LOOKUP, request_id)
            return None

    def take_refused(self) -> Counter[str]:
        """Return how many plans were refused since the last call, by reason."""
        return self._refused.take()

    def _accept_plain(self, new: NewRequest) -> RequestState | None:
        """Accept a request without a plan. Pieces of its prompt are its segments.

        No client reads a record of such a request, so it has none.
        """
        try:
            plan = ReusePlan("", plain_domain(new.cache_salt), ())
            lookup = self._lookups.start_plain(plan, new.token_ids, new.traceparent)
        except Exception:
            log.exception(_LOG_NO_LOOKUP, new.request_id)
            return None
        request = RequestState(plan, new.token_ids, (), lookup, time.monotonic(), recorded=True)
        request.traceparent = new.traceparent
        return request

    def _accept_planned(
        self, new: NewRequest, plan: ReusePlan, segments: tuple[NamedSegment, ...]
    ) -> RequestState:
        """Accept a request with a plan, whose leading ``segments`` match the prompt."""
        rest = plan.segments[len(segments) :]
        is_computed = bool(rest) and rest[0].action is Action.COMPUTE
        hands_off = plan.handoff is not None and (is_computed or not rest)
        if hands_off:
            request = self._accept_handoff(new, plan, segments)
        else:
            lookup = None
            if segments:
                lookup = self._lookups.start_planned(plan, segments, new.traceparent)
            num_savable = 0 if plan.trial else None
            now = time.monotonic()
            request = RequestState(plan, new.token_ids, segments, lookup, now, num_savable)
        request.traceparent = new.traceparent
        request.record.prompt_tokens = len(new.token_ids)
        if rest and not is_computed:
            request.record.miss = "plan does not match the prompt"
            log.warning("scheduler: plan does not match the prompt request=%s", plan.request)
        elif is_computed and not hands_off:
            request.record.miss = "planned to be computed"
        return request

    def _accept_handoff(
        self, new: NewRequest, plan: ReusePlan, segments: tuple[NamedSegment, ...]
    ) -> RequestState:
        """Accept a request that one engine computes and another one decodes."""
        now = time.monotonic()
        all_segments = handoff_segments(self._space, plan.domain, new.token_ids, segments)
        pieces = blended_pieces(plan, len(new.token_ids))
        lookup = self._lookups.start_planned(plan, all_segments, new.traceparent, pieces)
        request = RequestState(
            plan, new.token_ids, all_segments, lookup, now, blended_pieces=pieces
        )
        if plan.handoff is Handoff.DECODE:
            request.handoff = HandoffPolling(now, now + plan.handoff_wait_s)
            # If this engine has to compute after all, other requests can use the plan's chunks.
            # The rest of the prompt is of use to no other request.
            request.num_savable = len(segments)
        return request

    def _check_signature(
        self, plan: object, token_ids: Sequence[int], signature: object
    ) -> RefusalReason | None:
        """Return why to refuse a plan. None: its signature is valid, or none is required."""
        if self._settings.signing_key_file is None:
            return None
        if signature is None:
            return RefusalReason.UNSIGNED
        keys = self._settings.signing_key_file.current()
        until_s = signed_until_s(plan, token_ids, signature, keys)
        if until_s is None:
            return RefusalReason.FORGED
        return None if is_timely(until_s, time.time()) else RefusalReason.EXPIRED


class RefusalReason(StrEnum):
    """Why the connector refuses a plan. The values are labels of a metric."""

    UNSIGNED = "unsigned"
    FORGED = "forged"  # the signature is not a gateway's, or belongs to another plan or prompt
    EXPIRED = "expired"  # signed too long ago, or the clocks differ by more than a minute
    INVALID = "invalid"


class RefusedPlans:
    """Counts refused plans. Not thread-safe.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._num_unlogged = 0
        self._next_log_s = float("-inf")

    def add(self, request_id: str, reason: RefusalReason, error: Exception | None = None) -> None:
        """Count one more refused plan, and log it unless another was logged just before."""
        self._counts[reason.value] += 1
        now = self._clock()
        if now < self._next_log_s:
            self._num_unlogged += 1
            return
        log.warning(
            "scheduler: plan refused request=%s reason=%s%s%s",
            request_id,
            reason.value,
            f" error={error!s:.{_MAX_ERROR_CHARS}}" if error else "",
            f" since_last_line={self._num_unlogged}" if self._num_unlogged else "",
            # Log a traceback for errors that are not ours.
            exc_info=None if isinstance(error, RagCacheError) else error,
        )
        self._num_unlogged, self._next_log_s = 0, now + LOG_INTERVAL_S

    def take(self) -> Counter[str]:
        """Return how many plans were refused since the last call, by reason."""
        counts, self._counts = self._counts, Counter()
        return counts
