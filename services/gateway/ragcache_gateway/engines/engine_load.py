"""What a prefill would cost in each engine, and how busy the engine is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ragcache_core.cost.engine_costs import EngineCosts, QueueTime
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.planner.speculation import GuessCost, Load
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.tasks import BackgroundTasks
from ragcache_wire.v1 import engine_pb2

REFRESH_S = 1.0
"""Time between two requests for an engine's costs. Its queue is the part that changes fast."""

RECOMPUTED_TOKENS = 128
"""Tokens of a prefill that the question's own request computes again, at most: vLLM keeps full
blocks, and those of a CPU have 128 tokens."""

_FIRST_REFRESH_S = 1.0


@dataclass(slots=True)
class _Known:
    """The latest costs of one engine, and how long requests wait in it.

    ``own_queue`` is of this gateway's questions. ``all_queues`` is of the requests of all gateways,
    prefills included, as the engine has measured it.
    """

    costs: EngineCosts | None = None
    own_queue: QueueTime = field(default_factory=QueueTime)
    all_queues: QueueTime = field(default_factory=QueueTime)


class EngineLoads(BackgroundTasks):
    """Costs and load of all engines. For one event loop.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, engines: EnginePool, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.engines = engines
        self._clock = clock
        self._known: dict[str, _Known] = {}

    async def start(self) -> None:
        """Ask the engines for their costs from now on; wait for the first answers, but not long."""
        is_known = asyncio.Event()
        self._spawn(self._refresh_periodically(is_known))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_REFRESH_S):
                await is_known.wait()

    def costs(self, engine: Engine) -> EngineCosts | None:
        """Return what prefills and loads take in an engine; None if it has not said it."""
        known = self._known.get(engine.address)
        return known.costs if known is not None else None

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

    def load(self, engine: Engine, *, own_in_flight: int, own_pending: int) -> Load:
        """Return what an engine has to do beside the caller's own requests.

        Args:
            own_in_flight: Requests of the caller that it is answering.
            own_pending: Those of them without a first token.
        """
        pending = max(0, engine.pending - own_pending)
        in_flight = max(0, engine.in_flight - own_in_flight)
        known = self._known.get(engine.address)
        shared_s = known.all_queues.seconds(self._clock()) if known is not None else 0.0
        queue_s = max(shared_s, self.queue_s(engine.address))
        return Load(pending, max(0, in_flight - pending), queue_s)

    def observe(self, engine: Engine, record: engine_pb2.RequestRecord) -> None:
        """Learn from the record of a request how long requests wait in an engine."""
        known = self._known.get(engine.address)
        if known is not None:
            known.own_queue.observe(record.queue_s, self._clock())

    def queue_s(self, address: str) -> float:
        """Return how long this gateway's latest questions waited in an engine, in seconds."""
        known = self._known.get(address)
        return known.own_queue.seconds(self._clock()) if known is not None else 0.0

    async def _refresh_periodically(self, is_known: asyncio.Event) -> None:
        while True:
            engines = self.engines.known
            addresses = {engine.address for engine in engines}
            self._known = {one: known for one, known in self._known.items() if one in addresses}
            await asyncio.gather(*map(self._refresh, engines))
            is_known.set()
            await asyncio.sleep(REFRESH_S)

    async def _refresh(self, engine: Engine) -> None:
        with contextlib.suppress(RagCacheError):
            costs = await engine.costs()
            known = self._known.setdefault(engine.address, _Known())
            known.all_queues = QueueTime(costs.queue_s, self._clock())
            profile = profile_of(costs.prefill)
            loads = {load.tier: (load.latency_s, load.bytes_per_s) for load in costs.loads}
            known.costs = EngineCosts(profile, costs.correction or 1.0, loads) if profile else None


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
