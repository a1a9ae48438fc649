"""Checks new requests and starts their lookups."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from ragcache_core.cluster.handoff_polling import HandoffPolling
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.reuse_plan import NO_REUSE, Action, ReusePlan
from ragcache_core.plan.segments import (
    PIECE_TOKENS,
    NamedSegment,
    checked_segments,
    handoff_segments,
    plain_domain,
)
from ragcache_core.plan.signature import SIGNATURE_FIELD, is_signed
from ragcache_engine.protocol.roles import EngineRole
from ragcache_engine.scheduler.lookup import LookupExecutor
from ragcache_engine.scheduler.refused_plans import RefusalReason, RefusedPlans
from ragcache_engine.scheduler.request import RequestState
from ragcache_wire.settings import EngineSettings

log = logging.getLogger("vllm.ragcache")

PLAN_FIELD = "ragcache"
"""Name of the plan within a request's ``kv_transfer_params``."""


class RequestIntake:
    """Turns vLLM's new requests into ``RequestState``. No exception leaves its methods."""

    def __init__(
        self, settings: EngineSettings, space: KVSpace, lookups: LookupExecutor, role: EngineRole
    ) -> None:
        self._settings = settings
        self._space = space
        self._lookups = lookups
        self._role = role
        self._refused = RefusedPlans()
        if settings.signing_key_file is None:
            log.warning(
                "scheduler: RAGCACHE_SIGNING_KEY_FILE is not set, so any client can send a plan"
                " for any access domain"
            )

    def accept(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: object,
        *,
        cache_salt: str | None = None,
        cacheable: bool = True,
        traceparent: str = "",
    ) -> RequestState | None:
        """Start a request's lookup. Return None if the connector leaves the request to vLLM.

        Args:
            request_id: vLLM's id of the request.
            token_ids: The prompt.
            params: The request's ``kv_transfer_params``, as the client sent them.
            cache_salt: Which clients share blocks in vLLM's own prefix cache.
            cacheable: vLLM's own prefix cache would serve this request.
            traceparent: W3C trace context of the request's span. Empty: it is not traced.
        """
        fields = params if isinstance(params, dict) else {}
        plan_text = fields.get(PLAN_FIELD)
        if plan_text is None or plan_text == NO_REUSE:
            reuses = plan_text is None and self._settings.plain_prefixes and cacheable
            if reuses and len(token_ids) >= PIECE_TOKENS:
                return self._accept_plain(request_id, token_ids, cache_salt, traceparent)
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
            return self._accept_planned(token_ids, plan, segments, traceparent)
        except Exception:
            log.exception("scheduler: no lookup started, prompt is computed request=%s", request_id)
            return None

    def take_refused(self) -> Counter[str]:
        """Return how many plans were refused since the last call, by reason."""
        return self._refused.take()

    def _accept_plain(
        self, request_id: str, token_ids: Sequence[int], cache_salt: str | None, traceparent: str
    ) -> RequestState | None:
        """Accept a request without a plan. Pieces of its prompt are its segments.

        No client reads a record of such a request, so it has none.
        """
        try:
            plan = ReusePlan("", plain_domain(cache_salt), ())
            lookup = self._lookups.start_plain(plan, token_ids, traceparent)
        except Exception:
            log.exception("scheduler: no lookup started, prompt is computed request=%s", request_id)
            return None
        request = RequestState(plan, token_ids, (), lookup, time.monotonic(), recorded=True)
        request.traceparent = traceparent
        return request

    def _accept_planned(
        self,
        token_ids: Sequence[int],
        plan: ReusePlan,
        segments: tuple[NamedSegment, ...],
        traceparent: str,
    ) -> RequestState:
        """Accept a request with a plan.

        Args:
            token_ids: The prompt.
            plan: The plan.
            segments: The plan's leading segments that match the prompt.
            traceparent: As in ``accept``.
        """
        # Only prompts whose segments all match and are reusable are handed off.
        matches = len(segments) == len(plan.segments)
        if plan.handoff and matches and self._role is not EngineRole.BOTH:
            request = self._accept_handoff(token_ids, segments, plan, traceparent)
        else:
            lookup = None
            if segments:
                lookup = self._lookups.start_planned(plan, segments, traceparent)
            num_savable = 0 if plan.trial else None
            now = time.monotonic()
            request = RequestState(plan, token_ids, segments, lookup, now, num_savable)
        request.traceparent = traceparent
        request.record.prompt_tokens = len(token_ids)
        if not matches:
            if plan.segments[len(segments)].action is Action.COMPUTE:
                request.record.miss = "planned to be computed"
            else:
                request.record.miss = "plan does not match the prompt"
                log.warning("scheduler: plan does not match the prompt request=%s", plan.request)
        return request

    def _accept_handoff(
        self,
        token_ids: Sequence[int],
        segments: tuple[NamedSegment, ...],
        plan: ReusePlan,
        traceparent: str,
    ) -> RequestState:
        """Accept a request that one engine computes and another one decodes."""
        now = time.monotonic()
        all_segments = handoff_segments(self._space, plan.domain, token_ids, segments)
        lookup = self._lookups.start_planned(plan, all_segments, traceparent)
        request = RequestState(plan, token_ids, all_segments, lookup, now)
        if self._role is EngineRole.DECODE:
            request.handoff = HandoffPolling(now, now + self._settings.handoff_wait_s)
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
        return None if is_signed(plan, token_ids, signature, keys) else RefusalReason.FORGED
