"""What a prefill would cost in each engine, and what each engine has to do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from ragcache_core.cluster.pending_work import EngineLoad
from ragcache_core.cost.engine_costs import EngineCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.planner.speculation import GuessCost, Load
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.tasks import BackgroundTasks
from ragcache_wire.v1 import engine_pb2

REFRESH_S = 5.0
"""Time between two requests for an engine's costs, which change slowly."""

RECOMPUTED_TOKENS = 128
"""Tokens of a prefill that the question's own request computes again, at most: vLLM keeps full
blocks, and those of a CPU have 128 tokens."""

_FIRST_REFRESH_S = 1.0


class EngineLoads(BackgroundTasks):
    """Costs and load of all engines. For one event loop.

    Args:
        clock: Returns seconds, of the clock that the engines' queues have.
    """

    def __init__(self, engines: EnginePool, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.engines = engines
        self._clock = clock
        self._costs: dict[str, EngineCosts] = {}  # by address

    async def start(self) -> None:
        """Ask the engines for their costs from now on; wait for the first answers, but not long."""
        is_known = asyncio.Event()
        self._spawn(self._refresh_periodically(is_known))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_REFRESH_S):
                await is_known.wait()

    def costs(self, engine: Engine) -> EngineCosts | None:
        """Return what prefills and loads take in an engine; None if it has not said it."""
        return self._costs.get(engine.address)

    def prefill_cost(
        self, engine: Engine, cached: int, computed: int, load_s: float
    ) -> GuessCost | None:
        """Return what a prefill would cost; None if the engine has not said it.

        Args:
            cached: Tokens of the prompt that the engine has or loads.
            computed: Tokens that it has to compute after them.
            load_s: Predicted time of the loads.
        """
        costs = self.costs(engine)
        if costs is None:
            return None
        pass_tokens = costs.profile.pass_tokens
        one_pass = min(computed, pass_tokens)
        again = min(computed, RECOMPUTED_TOKENS)
        return GuessCost(
            uncached_tokens=computed,
            prefill_s=load_s + costs.compute_s(cached, computed),
            again_s=costs.compute_s(cached + computed - again, again),
            step_s=costs.compute_s(cached + computed - one_pass, one_pass),
            pass_tokens=pass_tokens,
        )

    def load(self, engine: Engine) -> EngineLoad:
        """Return what an engine has to do now."""
        return engine.queue.load(self._clock(), engine.in_flight)

    def queue_s(self, engine: Engine, position: QueuePosition | None = None) -> float:
        """Return the predicted seconds until a new question could begin in an engine.

        Args:
            position: Of the question in the engine's queue. None: after all that waits.
        """
        load = self.load(engine)
        if position is None:
            return load.pending_s
        share = engine.waiting.share_before(position.priority(unix_ms()))
        return load.before_s(share * position.tenant_excess)

    def load_for_guess(self, engine: Engine, own_left_s: float | None) -> Load:
        """Return what an engine has to do before a guess, and beside it.

        Args:
            own_left_s: Predicted seconds that the question's own guess still takes, which the new
                one would replace. None: there is no such guess in the engine.
        """
        load = self.load(engine)
        return Load(
            num_pending=max(0, load.num_pending + load.num_background - (own_left_s is not None)),
            num_decoding=load.num_decoding,
            queue_s=max(0.0, load.pending_s + load.background_s - (own_left_s or 0.0)),
        )

    async def _refresh_periodically(self, is_known: asyncio.Event) -> None:
        while True:
            engines = self.engines.known
            addresses = {engine.address for engine in engines}
            self._costs = {one: costs for one, costs in self._costs.items() if one in addresses}
            await asyncio.gather(*map(self._refresh, engines))
            is_known.set()
            await asyncio.sleep(REFRESH_S)

    async def _refresh(self, engine: Engine) -> None:
        with contextlib.suppress(RagCacheError):
            costs = await engine.costs()
            profile = profile_of(costs.prefill)
            if profile is None:
                self._costs.pop(engine.address, None)
                return
            loads = {load.tier: (load.latency_s, load.bytes_per_s) for load in costs.loads}
            self._costs[engine.address] = EngineCosts(
                profile, costs.correction or 1.0, loads, costs.request_s
            )


def unix_ms() -> int:
    """Return the Unix time in milliseconds. Priorities in engines' queues contain it."""
    return time.time_ns() // 1_000_000


def profile_of(message: engine_pb2.PrefillProfile) -> PrefillProfile | None:
    """Read an engine's profile; None if it has none."""
    if not message.computed:
        return None
    width = len(message.computed)
    rows = range(0, len(message.seconds), width)
    try:
        return PrefillProfile(
            tuple(message.cached),
            tuple(message.computed),
            tuple(tuple(message.seconds[first : first + width]) for first in rows),
            message.pass_tokens,
        )
    except InvalidInput:
        return None
