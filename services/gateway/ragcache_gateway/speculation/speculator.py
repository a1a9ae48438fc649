"""What all questions of a gateway share to compute prompts during their searches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ragcache_core.planner.speculation import GuessCost, Load, is_beneficial, may_be_beneficial
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.engine_load import RECOMPUTED_TOKENS, EngineLoads
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.planning.request_planner import RequestPlanner
from ragcache_gateway.speculation.interim_stage import StagePrompt
from ragcache_gateway.speculation.prefill import PrefillState, SpeculativePrefill, SpeculativePrompt
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.tracing import Tracer

MAX_COLLECTIONS = 256
_SEARCH_WEIGHT = 0.2


class Speculator:
    """Engines, their load, and how long searches take. For one event loop."""

    def __init__(
        self,
        engines: EnginePool,
        loads: EngineLoads,
        planner: RequestPlanner,
        metrics: Metrics,
        tracer: Tracer,
    ) -> None:
        self._engines = engines
        self.planner = planner
        self._loads = loads
        self._search_s: OrderedDict[str, float] = OrderedDict()
        self.metrics = metrics
        self.tracer = tracer

    def may_prefill(self, final_probability: float, own: SpeculativePrefill | None) -> bool:
        """Return whether a prefill may be beneficial in any engine, with any prompt."""
        return any(
            may_be_beneficial(final_probability, self.load(engine, own))
            for engine in self._engines.healthy
        )

    def load(self, engine: Engine, own: SpeculativePrefill | None) -> Load:
        """Return what an engine has to do beside a question's own prefill."""
        is_own = own is not None and own.engine is engine and own.state is PrefillState.RUNNING
        return self._loads.load_for_guess(engine, own.left_s if own and is_own else None)

    def cost(self, engine: Engine, staged: StagePrompt, *, spared: int = 0) -> GuessCost | None:
        """Return what an engine loads and computes for a prompt, by the prompt's plan.

        None if the engine has not said what prefills cost.

        Args:
            spared: Tokens at the end of the prompt that do not count.
        """
        plan, cached = staged.plan, staged.plan.reused_tokens
        computed = max(0, len(staged.answer.prompt.token_ids) - cached - spared)
        load_s = plan.seconds.load_s if plan.seconds is not None else 0.0
        return self._loads.prefill_cost(engine, cached, computed, load_s)

    def warm_up_cost(
        self, engine: Engine, head: StagePrompt, remaining_s: float
    ) -> GuessCost | None:
        """Return the cost of a prompt's head, if it is beneficial to compute it during a search.

        The question has to compute the rest of its prompt anyway, so its request is not a second
        one. The last tokens of the head do not count: they may fill no block. An engine without
        RagCache tells no costs. It computes a head that it lacks while nothing else waits for it,
        as in RAGCache++, section 3.6.

        Args:
            remaining_s: Expected time to the end of the search.
        """
        load = self.load(engine, None)
        cost = self.cost(engine, head, spared=RECOMPUTED_TOKENS)
        if cost is not None:
            cost = replace(cost, again_s=0.0)
            return cost if is_beneficial(1.0, remaining_s, cost, load) else None
        num_tokens = len(head.answer.prompt.token_ids) - head.plan.reused_tokens
        if engine.records is not None or load.num_pending or num_tokens <= RECOMPUTED_TOKENS:
            return None
        return GuessCost(num_tokens, 0.0, 0.0, 0.0, pass_tokens=num_tokens)

    def start_prefill(
        self, speculative: SpeculativePrompt, engine: Engine, body: Mapping[str, Any]
    ) -> SpeculativePrefill:
        """Have an engine compute a prompt, at low priority."""

        def record(prefill: SpeculativePrefill) -> None:
            self.planner.record_prefilled(prefill.engine, prefill.speculative.staged.plan)

        span = self.tracer.start_step(
            "guess",
            engine=engine.address,
            prompt_tokens=len(speculative.prompt.token_ids),
            cached_tokens=speculative.cached,
        )
        return SpeculativePrefill(speculative, engine, body, self._engines, record, span)

    def usual_search_s(self, collection: str) -> float:
        """Return the mean time of the latest searches of a collection; 0 if there was none."""
        return self._search_s.get(collection, 0.0)

    def search_ended(self, collection: str, search_s: float) -> None:
        """Learn from the time of a search."""
        before_s = self._search_s.pop(collection, search_s)
        self._search_s[collection] = before_s + _SEARCH_WEIGHT * (search_s - before_s)
        if len(self._search_s) > MAX_COLLECTIONS:
            self._search_s.popitem(last=False)
