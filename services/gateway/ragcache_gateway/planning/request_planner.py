"""Plans requests, from the cache view and from costs and queues of the engines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final, Literal

from ragcache_core.identity.keys import ChunkKey, KVSpace
from ragcache_core.planner.planner import plan_request
from ragcache_core.planner.request_plan import (
    ChunkAction,
    ChunkDecision,
    PlannedEngine,
    PlannedPrompt,
    PlanPolicy,
    PlanSeconds,
    RequestPlan,
)
from ragcache_core.planner.stored_path import is_on_disk_only
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.engine_load import EngineLoads
from ragcache_gateway.planning.cache_view import CacheView, engine_address, engine_source
from ragcache_gateway.prompts.reuse_mode import ReuseMode
from ragcache_kv.values.layout import value_bytes
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.tracing import Span, Tracer

Order = Literal["rank", "cached"]

_ROUNDING: Final = 1e-6
"""A sum of predicted seconds may be off by less than this share of one of them."""


@dataclass(frozen=True, slots=True)
class PrefilledChunks:
    """What an engine has computed for a question while its search ran.

    Attributes:
        chunks: Leading chunks of the prompt that it has, as far as is known.
        is_running: Whether it still computes, so that its requests in flight include this one.
        is_confirmed: Whether this is the question's own prompt. Then the engine gets the question.
    """

    engine: Engine
    chunks: tuple[ChunkKey, ...]
    is_running: bool = False
    is_confirmed: bool = False


class RequestPlanner:
    """Chooses order and engine of each request. For one event loop.

    Args:
        view: What engines and shards have.
        clock: Returns seconds that never go back.
        tracer: Makes a span of each plan. None: it makes none.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        space: KVSpace,
        loads: EngineLoads,
        view: CacheView,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer or Tracer()
        self._view = view
        self._default_order: Order = settings.order
        self._max_displacement = settings.max_displacement
        self._token_bytes = value_bytes(space, 1)
        self._engines = loads.engines
        self._loads = loads
        self._clock = clock
        self._waiting_s: dict[str, float] = {}  # predicted work without a first token, by address

    def now(self) -> float:
        """Return the time, in seconds of a clock that never goes back."""
        return self._clock()

    def plan(
        self,
        prompt: PlannedPrompt,
        reuse: ReuseMode,
        order: Order | None,
        *,
        is_trial: bool,
        prefilled: Sequence[PrefilledChunks] = (),
    ) -> RequestPlan:
        """Choose the order of a prompt's documents and its engine.

        Args:
            order: As the request sets it. None: the platform's setting.
            prefilled: What engines have computed for the question. The engine of a confirmed prompt
                is chosen if it is healthy.
            is_trial: The request measures quality, so documents keep their ranks.
        """
        policy = PlanPolicy(
            order="rank" if is_trial else order or self._default_order,
            reuse="off" if is_trial else reuse.mode,
            max_displacement=self._max_displacement,
            recompute_share=reuse.max_recompute_share,
            token_bytes=self._token_bytes,
        )
        healthy = self._engines.healthy
        confirmed = [one.engine for one in prefilled if one.is_confirmed and one.engine in healthy]
        engines = [
            PlannedEngine(
                engine_source(engine.address),
                self._loads.costs(engine),
                self._waiting_s.get(engine.address, 0.0) + self._loads.queue_s(engine.address),
                engine.in_flight
                - sum(one.is_running and one.engine is engine for one in prefilled),
                self._engines.last_chosen(engine),
                reads_store=engine.records is not None,
                computed=[one.chunks for one in prefilled if one.engine is engine],
            )
            for engine in confirmed or healthy
        ]
        tree = self._view.tree
        with self._tracer.start_step("plan") as span:
            plan = plan_request(tree, prompt, engines, policy, self._stale())
            describe_plan(span, plan)
        return plan

    def renew(
        self,
        plan: RequestPlan,
        prompt: PlannedPrompt,
        reuse: ReuseMode,
        prefilled: Sequence[PrefilledChunks] = (),
    ) -> RequestPlan:
        """Choose the engine again right before the request is sent, for the order of a plan.

        Other requests may have been sent since the plan was made. ``prefilled`` is as in ``plan``.
        """
        if len(self._engines.healthy) < 2 and not prefilled:
            return plan
        documents = [prompt.documents[rank] for rank in plan.order]
        ordered = replace(prompt, documents=documents)
        renewed = self.plan(ordered, reuse, "rank", is_trial=False, prefilled=prefilled)
        # Its ranks are those of the ordered documents, and it has compared no other order.
        other = renewed.runner_up
        runner_up = None if other is None else replace(other, order=plan.order)
        return replace(renewed, order=plan.order, runner_up=runner_up)

    def is_on_disk_only(self, chunks: Sequence[ChunkKey]) -> bool:
        """Return whether a cache store has one of the chunks on a disk, and none in memory."""
        tree, stale = self._view.tree, self._stale()
        return any(is_on_disk_only(tree, chunk, stale) for chunk in chunks)

    def engine_of(self, plan: RequestPlan) -> Engine | None:
        """Return the engine that a plan has chosen. None: it has left."""
        return next(
            (e for e in self._engines.known if engine_source(e.address) == plan.source), None
        )

    @contextmanager
    def waiting(self, engine: Engine | None, plan: RequestPlan) -> Generator[None, None, None]:
        """Count the predicted time of a request in its engine's queue, until its first token."""
        work_s = plan.seconds.total_s - plan.seconds.queue_s if plan.seconds else 0.0
        if engine is None or not work_s:
            yield
            return
        address = engine.address
        self._waiting_s[address] = self._waiting_s.get(address, 0.0) + work_s
        try:
            yield
        finally:
            left_s = self._waiting_s.pop(address, 0.0) - work_s
            if left_s > work_s * _ROUNDING:
                self._waiting_s[address] = left_s

    def computed(self, engine: Engine, plan: RequestPlan, *, blends: bool) -> None:
        """Record that an engine has computed a prompt: its prefix cache has it now.

        Args:
            blends: The engine may have blended chunks. No other request finds those, nor what was
                computed after them.
        """
        now = self.now()
        self._view.tree.record_use([decision.chunk for decision in plan.decisions], now)
        decisions = plan.decisions
        if blends:
            exact = (ChunkAction.CACHED, ChunkAction.LOAD)
            decisions = tuple(takewhile(lambda one: one.action in exact, decisions))
        self._predict(engine, decisions, now)

    def record_prefilled(self, engine: Engine, plan: RequestPlan) -> None:
        """Record that an engine has computed a prefill or a system prompt exactly. It is no use."""
        self._predict(engine, plan.decisions, self.now())

    def observe_hit(
        self, engine: Engine, plan: RequestPlan, cached_tokens: int, sent_s: float
    ) -> None:
        """Remove predictions that the cached tokens of a request contradict.

        Args:
            cached_tokens: Tokens that the engine found in its prefix cache.
            sent_s: When the request was sent, from ``now``.
        """
        chunks = [decision.chunk for decision in plan.decisions]
        self._view.observe_hit(engine.address, chunks, cached_tokens, sent_s)

    def _stale(self) -> frozenset[str]:
        """Return the sources whose part of the tree may be out of date."""
        return frozenset(self._view.tree.sources) - self._view.sources

    def _predict(self, engine: Engine, decisions: Sequence[ChunkDecision], now_s: float) -> None:
        chunks = [decision.chunk for decision in decisions]
        num_tokens = [decision.num_tokens for decision in decisions]
        self._view.predict(engine.address, chunks, num_tokens, now_s)


def describe_plan(span: Span, plan: RequestPlan) -> None:
    """Set the attributes of a plan's span, and an event for the next best plan."""
    if not span.is_recording:
        return
    chunks = Counter(f"{decision.action.value}_chunks" for decision in plan.decisions)
    span.set(
        considered=plan.num_considered,
        engine=engine_address(plan.source),
        reordered=plan.is_reordered,
        **chunks,
        **_predicted(plan.seconds),
    )
    if (other := plan.runner_up) is not None:
        engine = engine_address(other.source)
        span.event("next best", engine=engine, reuse=other.reuse, **_predicted(other.seconds))


def _predicted(seconds: PlanSeconds | None) -> dict[str, float]:
    if seconds is None:
        return {}
    return {
        "queue_s": seconds.queue_s,
        "load_s": seconds.load_s,
        "recompute_s": seconds.recompute_s,
        "prefill_s": seconds.prefill_s,
    }
