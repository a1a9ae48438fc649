"""Publishes what the engine has to do, so that all gateways know one queue.

The scheduler half tells each change of a request's phase, and a step publishes them together. A
request without a plan counts like any other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec

from ragcache_core.cluster.pending_work import EngineLoad, PendingWork
from ragcache_core.cluster.sent_requests import SENT_FIELD, SentRequest
from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_engine.scheduler.block_reservation import BlockReservation
from ragcache_engine.scheduler.request import RequestState
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_engine.telemetry.load_counts import DECODING

if TYPE_CHECKING:
    from ragcache_engine.vllm_interface.block_events import PrefixCacheEvents

log = logging.getLogger("vllm.ragcache")

_FREE_SHARE: Final = 1 / 64
"""Free tokens are published when they have changed by this share of the cache. Decoding requests
take a block every few steps, and nothing depends on a single one."""

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class ArrivedRequest:
    """A request that vLLM has accepted, also one that the connector leaves to vLLM.

    Attributes:
        num_tokens: Length of its prompt.
        params: Its ``kv_transfer_params``, as the client sent them.
        block_hashes: vLLM's hashes of the prompt's full blocks.
    """

    request_id: str
    num_tokens: int
    params: object = None
    block_hashes: Sequence[bytes] = ()


def _logs_errors(
    method: Callable[Concatenate[LoadPublisher, P], None],
) -> Callable[Concatenate[LoadPublisher, P], None]:
    """Log an exception and go on, because vLLM ends the engine on one."""

    @wraps(method)
    def tolerant(publisher: LoadPublisher, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(publisher, *args, **kwargs)
        except Exception:
            log.exception("scheduler: the engine's queue is not told in full")

    return tolerant


class LoadPublisher:
    """Follows the requests of one engine. vLLM's scheduler thread calls all methods.

    No exception leaves them.

    Args:
        costs: Predictions of loads and computations.
        feed: Where to publish. None: nothing is published.
        clock: Returns seconds.
    """

    def __init__(
        self,
        costs: ReuseCosts,
        feed: EngineFeed | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._costs = costs
        self._feed = feed
        self._clock = clock
        self._work = PendingWork()
        self._reservation: BlockReservation | None = None
        self._cache: PrefixCacheEvents | None = None
        self._accepted: list[SentRequest] = []  # since the last publication
        self._published_free: int | None = None
        self._has_changed = False
        self._uncounted: EngineLoad | None = None  # published since the last count

    def bind(self, reservation: BlockReservation, cache: PrefixCacheEvents | None) -> None:
        """Use vLLM's block pool, and its prefix cache if it is followed."""
        self._reservation, self._cache, self._has_changed = reservation, cache, True
        self.publish()

    @_logs_errors
    def on_arrival(self, arrival: ArrivedRequest) -> None:
        """Add a request that vLLM has accepted."""
        fields = arrival.params if isinstance(arrival.params, dict) else {}
        sent = SentRequest.from_field(fields.get(SENT_FIELD))
        if sent is not None:
            self._accepted.append(sent)
        self._work.accept(
            arrival.request_id,
            arrival.num_tokens,
            self._expected_s(arrival, sent),
            is_background=sent is not None and sent.is_background,
        )
        self._has_changed = True

    @_logs_errors
    def on_handoff(self, request_id: str) -> None:
        """Count no work for a request that waits for another engine, until its decision."""
        self._work.predict(request_id, 0.0)
        self._has_changed = True

    @_logs_errors
    def on_decision(self, request_id: str, request: RequestState) -> None:
        """Replace the prediction of a request by that of its decision what to load."""
        decision = request.decision
        if decision is not None and decision.predicted is not None:
            self._work.predict(request_id, decision.predicted.total_s)
            self._has_changed = True

    @_logs_errors
    def on_load_started(self, request_id: str, request: RequestState) -> None:
        """Record that the load of a request has begun."""
        decision = request.decision
        if decision is not None and (predicted := decision.predicted) is not None:
            before_s = predicted.load_s + predicted.select_s
            self._work.begin_load(request_id, before_s, predicted.passes_s, self._clock())
            self._has_changed = True

    @_logs_errors
    def on_load_ended(self, request_id: str) -> None:
        """Record that the load of a request has ended."""
        self._work.end_load(request_id)
        self._has_changed = True

    @_logs_errors
    def begin_step(self, preempted_ids: Iterable[str]) -> None:
        """Begin a step.

        Args:
            preempted_ids: Requests that vLLM has preempted since the last step.
        """
        self._has_changed |= self._work.begin_step()
        for request_id in preempted_ids:
            num_tokens = self._work.num_tokens(request_id)
            self._work.restart(request_id, self._costs.predict_compute_s(0, num_tokens) or 0.0)
            self._has_changed = True

    def is_pending(self, request_id: str) -> bool:
        """Return whether a request is known to have no first token."""
        return request_id in self._work

    @_logs_errors
    def on_progress(
        self, request_id: str, computed: int, scheduled: int, request: RequestState | None
    ) -> None:
        """Record that a pass begins to compute tokens of a pending request.

        Args:
            computed: Tokens that have KV.
            scheduled: Tokens that the pass computes.
            request: None: the connector leaves it to vLLM.
        """
        self._has_changed = True
        left = self._work.num_tokens(request_id) - computed
        if left <= 0:
            self._work.decode(request_id)
            return
        left_s = self._costs.predict_compute_s(computed, left)
        if request is not None and request.left_to_recompute and request.decision is not None:
            # The request's first pass also recomputes tokens of a blend.
            predicted = request.decision.predicted
            left_s = predicted.passes_s if predicted is not None else left_s
        pass_s = self._costs.predict_compute_s(computed, min(scheduled, left))
        self._work.compute(request_id, left_s, pass_s or 0.0)

    @_logs_errors
    def on_finished(self, request_id: str) -> None:
        """Remove a request that has ended."""
        self._work.end(request_id)
        self._has_changed = True

    @_logs_errors
    def publish(self) -> None:
        """Publish what the engine has to do, if that has changed. Call it once in each step."""
        reservation = self._reservation
        free = reservation.free_tokens if reservation is not None else None
        if not self._has_changed and not self._is_free_changed(free):
            return
        accepted, self._accepted = self._accepted, []
        self._has_changed, self._published_free = False, free
        self._uncounted = load = self._work.load(self._clock(), free)
        if self._feed is not None:
            self._feed.publish_load(load, accepted)

    def take_changes(self) -> dict[str, float]:
        """Return what was published since the last call, for metrics. Empty: nothing was."""
        load, self._uncounted = self._uncounted, None
        if load is None:
            return {}
        return {
            "question": load.pending_s,
            "background": load.background_s,
            DECODING: load.num_decoding,
        }

    def _is_free_changed(self, free: int | None) -> bool:
        before, reservation = self._published_free, self._reservation
        if free is None or before is None or reservation is None:
            return free is not before
        return abs(free - before) >= _FREE_SHARE * reservation.num_tokens

    def _expected_s(self, arrival: ArrivedRequest, sent: SentRequest | None) -> float:
        """Return the predicted seconds of a request that nothing else is known of.

        A gateway has planned with what is stored. A request takes no longer than to compute it.
        """
        length = arrival.num_tokens
        cached = min(self._num_cached(arrival.block_hashes), length - 1)
        compute_s = self._costs.predict_compute_s(cached, length - cached)
        if sent is None or not sent.work_s:
            return compute_s or 0.0
        return sent.work_s if compute_s is None else min(sent.work_s, compute_s)

    def _num_cached(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many tokens vLLM's own prefix cache has of a prompt, in a few lookups."""
        if (cache := self._cache) is None:
            return 0
        low, high = 0, len(block_hashes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if cache.has(block_hashes[middle]) else (low, middle)
        return low * cache.block_tokens
