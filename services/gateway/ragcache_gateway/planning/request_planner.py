"""Plans requests, from the cache view and from costs and queues of the engines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from ragcache_core.identity.keys import ChunkKey, KVSpace
from ragcache_core.planner.engine_pair import plan_engines
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
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_gateway.admission.decode_limit import DecodeLimit
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.engine_load import EngineLoads
from ragcache_gateway.planning.cache_view import CacheView, engine_address, engine_source
from ragcache_gateway.prompts.reuse_mode import ReuseMode
from ragcache_kv.values.layout import value_bytes
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.tracing import Span, Tracer

Order = Literal["rank", "cached"]


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
        self._decodes = DecodeLimit(settings, loads)
        self._view = view
        self._default_order: Order = settings.order
        self._max_displacement = settings.max_displacement
        self._token_bytes = value_bytes(space, 1)
        self._engines = loads.engines
        self._loads = loads
        self._clock = clock

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
        position: QueuePosition | None = None,
    ) -> RequestPlan:
        """Choose the order of a prompt's documents and its engine.

        Args:
            order: As the request sets it. None: the platform's setting.
            prefilled: What engines have computed for the question. The engine of a confirmed prompt
                is chosen if it is healthy.
            is_trial: The request measures quality, so documents keep their ranks.
            position: In the engines' queues. None: after all that waits.
        """
        policy = PlanPolicy(
            order="rank" if is_trial else order or self._default_order,
            reuse="off" if is_trial else reuse.mode,
            max_displacement=self._max_displacement,
            recompute_share=reuse.max_recompute_share,
            token_bytes=self._token_bytes,
        )
        candidates = self._candidates(prefilled)
        engines = [self._planned(engine, prefilled, position) for engine in candidates]
        tree = self._view.tree
        with self._tracer.start_step("plan") as span:
            plan = plan_engines(tree, prompt, engines, policy, self._stale())
            describe_plan(span, plan)
        return plan

    def renew(
        self,
        plan: RequestPlan,
        prompt: PlannedPrompt,
        reuse: ReuseMode,
        prefilled: Sequence[PrefilledChunks] = (),
        position: QueuePosition | None = None,
    ) -> RequestPlan:
        """Choose the engine again right before the request is sent, for the order of a plan.

        Other requests may have been sent since the plan was made. ``prefilled`` and ``position``
        are as in ``plan``.
        """
        if len(self._engines.healthy) < 2 and not prefilled:
            return plan
        documents = [prompt.documents[rank] for rank in plan.order]
        ordered = replace(prompt, documents=documents)
        renewed = self.plan(
            ordered, reuse, "rank", is_trial=False, prefilled=prefilled, position=position
        )
        # Its ranks are those of the ordered documents, and it has compared no other order.
        other = renewed.runner_up
        runner_up = None if other is None else replace(other, order=plan.order)
        return replace(renewed, order=plan.order, runner_up=runner_up)

    def is_on_disk_only(self, chunks: Sequence[ChunkKey]) -> bool:
        """Return whether a cache store has one of the chunks on a disk, and none in memory."""
        tree, stale = self._view.tree, self._stale()
        return any(is_on_disk_only(tree, chunk, stale) for chunk in chunks)

    def engine_of(self, plan: RequestPlan) -> Engine | None:
        """Return the engine that a plan has chosen for the answer. None: it has left."""
        return self._engine(plan.source)

    def prefill_engine_of(self, plan: RequestPlan) -> Engine | None:
        """Return the engine that a plan has chosen for the prompt. None: it has left."""
        return self._engine(plan.prefill_source or plan.source)

    def computed(self, engine: Engine, plan: RequestPlan, *, blends: bool) -> None:
        """Record that an engine has computed a prompt: its prefix cache has it now.

        Args:
            blends: The engine may have blended chunks. No other request finds those, nor what was
                computed after them.
        """
        self._view.tree.record_use([decision.chunk for decision in plan.decisions], self.now())
        self.record_prefilled(engine, plan, blends=blends)

    def record_prefilled(self, engine: Engine, plan: RequestPlan, *, blends: bool = False) -> None:
        """Record that an engine has computed a prompt, which is no use of it.

        Args:
            blends: As in ``computed``.
        """
        decisions = plan.decisions
        if blends:
            exact = (ChunkAction.CACHED, ChunkAction.LOAD)
            decisions = tuple(takewhile(lambda one: one.action in exact, decisions))
        self._predict(engine, decisions, self.now())

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

    def _engine(self, source: str) -> Engine | None:
        return next((e for e in self._engines.known if engine_source(e.address) == source), None)

    def _candidates(self, prefilled: Sequence[PrefilledChunks]) -> list[Engine]:
        """Return the engines to compare. One that only prefills needs another one to decode."""
        healthy = self._engines.healthy
        confirmed = [one.engine for one in prefilled if one.is_confirmed and one.engine in healthy]
        if any(engine.role != "prefill" for engine in confirmed):
            return confirmed
        decoding = self._decodes.with_room([one for one in healthy if one.role != "prefill"])
        return [*(confirmed or [one for one in healthy if one.role == "prefill"]), *decoding]

    def _planned(
        self, engine: Engine, prefilled: Sequence[PrefilledChunks], position: QueuePosition | None
    ) -> PlannedEngine:
        load = self._loads.load(engine)
        own = [one for one in prefilled if one.engine is engine]
        return PlannedEngine(
            engine_source(engine.address),
            self._loads.costs(engine),
            self._loads.queue_s(engine, position),
            engine.in_flight - sum(one.is_running for one in own),
            self._engines.last_chosen(engine),
            reads_store=engine.records is not None,
            computed=[one.chunks for one in own],
            num_decoding=load.num_decoding,
            free_tokens=load.free_tokens,
            role=engine.role,
        )

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
        prefill_engine=engine_address(plan.prefill_source or plan.source),
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
