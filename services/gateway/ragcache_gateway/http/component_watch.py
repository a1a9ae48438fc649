"""Watches the parts that answers need: whether each one is up, and when one that is not may be."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, Field

from ragcache_core.cost.retry_after import OutageForecast
from ragcache_core.errors import RagCacheError
from ragcache_core.planner.request_plan import EngineRole
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.http.errors import ErrorDetail
from ragcache_gateway.shown_address import NAME_HELP, ShownText, server_name
from ragcache_gateway.tasks import BackgroundTasks
from ragcache_wire.clients.engine_client import HealthClient


class PartReadiness(BaseModel):
    """Whether one part that the gateway depends on is ready."""

    ready: bool
    problem: ShownText | None = None


class EngineReadiness(PartReadiness):
    """One engine, by the address of its server."""

    address: ShownText
    name: str = Field(description=NAME_HELP)
    model: str = Field(description="The model that it serves.")
    in_flight: int = Field(description="Requests of this gateway that the engine is answering.")
    role: EngineRole = Field(
        default="both", description="What it does for a request, where others can do the rest."
    )
    queue_s: float = Field(
        description="Predicted seconds until a new question could begin in the engine."
    )
    waiting: int = Field(
        description="Questions of all gateways without a first token. Without a feed of the "
        "engine, those of this gateway. The same holds for queue_s and decoding."
    )
    decoding: int = Field(description="Requests whose answers the engine generates.")
    free_tokens: int | None = Field(
        description="Tokens that the engine's KV cache can take without preempting a request. "
        "null: it has not said it."
    )


class EnginePoolReadiness(PartReadiness):
    """All engines: ready if one of each model is."""

    endpoints: list[EngineReadiness]


class AllReadiness(BaseModel):
    """The parts that an answer needs."""

    retriever: PartReadiness
    engine: EnginePoolReadiness


class Answering(BaseModel):
    """Every part that an answer needs is ready."""

    status: Literal["answering"] = "answering"
    parts: AllReadiness


class NotAnswering(BaseModel):
    """A part that an answer needs is not ready."""

    error: ErrorDetail = Field(description="The message names the part.")
    parts: AllReadiness


class ComponentWatch(BackgroundTasks):
    """Asks the retriever for its state periodically, and the pool which engines have failed.

    Args:
        engines: Those of each model, by its name.
        health: Of the retriever.
        every_s: Time between two checks.
    """

    def __init__(
        self,
        engines: Mapping[str, EnginePool],
        health: HealthClient,
        every_s: float,
    ) -> None:
        super().__init__()
        self._engines = engines
        self._health = health
        self._every_s = every_s
        self._retriever = PartReadiness(ready=False, problem="it has not answered yet")
        self._outages = {"retriever": OutageForecast(), "engine": OutageForecast()}

    def start(self) -> None:
        """Begin to watch."""
        self._spawn(self._repeat(self._check, self._every_s, "component watch: not refreshed"))

    @property
    def parts(self) -> AllReadiness:
        """The state of every part that an answer needs, as of the last check."""
        return AllReadiness(retriever=self._retriever, engine=_engine_pool_readiness(self._engines))

    def recovery_s(self, part: str) -> float:
        """Return when a part that failed a request is expected to be up; 0 if it is not watched."""
        outages = self._outages.get(part)
        return 0.0 if outages is None else outages.remaining_s(time.monotonic())

    @property
    def longest_recovery_s(self) -> float:
        """When the last part that is not ready is expected to be up."""
        states = (("retriever", self.parts.retriever), ("engine", self.parts.engine))
        return max((self.recovery_s(part) for part, state in states if not state.ready), default=0)

    async def _check(self) -> None:
        self._retriever = await _retriever_readiness(self._health)
        now = time.monotonic()
        self._outages["retriever"].record(now, is_up=self._retriever.ready)
        self._outages["engine"].record(now, is_up=engine_problem(self._engines) is None)


def not_ready_message(parts: AllReadiness) -> str | None:
    """Return one line that names the parts that are not ready; None if all are."""
    return (
        "; ".join(
            f"the {name} is not ready: {state.problem}"
            for name, state in (("retriever", parts.retriever), ("engine", parts.engine))
            if not state.ready
        )
        or None
    )


def engine_problem(engines: Mapping[str, EnginePool]) -> str | None:
    """Return why a model has no engine that can answer; None if each one has."""
    problems = {name: pool.problem for name, pool in engines.items() if pool.problem is not None}
    if len(engines) == 1:
        return next(iter(problems.values()), None)
    return "; ".join(f"model {name}: {problem}" for name, problem in problems.items()) or None


def _engine_pool_readiness(engines: Mapping[str, EnginePool]) -> EnginePoolReadiness:
    problem = engine_problem(engines)
    return EnginePoolReadiness(
        ready=problem is None,
        problem=problem,
        endpoints=[
            _engine_readiness(engine, name)
            for name, pool in engines.items()
            for engine in pool.known
        ],
    )


def _engine_readiness(engine: Engine, model: str) -> EngineReadiness:
    load = engine.queue.load(time.monotonic(), engine.in_flight)
    return EngineReadiness(
        ready=engine.failure is None,
        problem=engine.failure,
        address=engine.address,
        name=server_name(engine.address),
        model=model,
        in_flight=engine.in_flight,
        role=engine.role,
        queue_s=round(load.pending_s, 3),
        waiting=load.num_pending,
        decoding=load.num_decoding,
        free_tokens=load.free_tokens,
    )


async def _retriever_readiness(health: HealthClient) -> PartReadiness:
    try:
        serving = await health.serving()
    except RagCacheError as error:
        return PartReadiness(ready=False, problem=str(error))
    return PartReadiness(ready=serving, problem=None if serving else "it is not serving yet")
