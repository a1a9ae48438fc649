"""Whether the gateway could answer a question now, and which part prevents it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from ragcache_core.errors import RagCacheError
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.http.errors import ErrorDetail
from ragcache_wire.clients.health_client import HealthClient


class PartReadiness(BaseModel):
    """Whether one part that the gateway depends on is ready."""

    ready: bool
    problem: str | None = None


class EngineReadiness(PartReadiness):
    """One engine, by the address of its server."""

    address: str
    in_flight: int = Field(description="Requests of this gateway that the engine is answering.")


class EnginePoolReadiness(PartReadiness):
    """All engines: ready if one of them is."""

    endpoints: list[EngineReadiness]


class AllReadiness(BaseModel):
    """The parts that an answer needs."""

    retriever: PartReadiness
    engine: EnginePoolReadiness


class Ready(BaseModel):
    """Every part that an answer needs is ready."""

    status: Literal["ready"] = "ready"
    parts: AllReadiness


class NotReady(BaseModel):
    """A part that an answer needs is not ready."""

    error: ErrorDetail = Field(description="The message names the part.")
    parts: AllReadiness


@dataclass(frozen=True, slots=True)
class Readiness:
    """Asks the retriever for its health, and the pool which engines have failed."""

    engines: EnginePool
    retriever: HealthClient

    async def check(self) -> AllReadiness:
        """Return the state of every part that an answer needs."""
        return AllReadiness(
            retriever=await _retriever_readiness(self.retriever),
            engine=_engine_pool_readiness(self.engines),
        )


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


def _engine_pool_readiness(engines: EnginePool) -> EnginePoolReadiness:
    return EnginePoolReadiness(
        ready=engines.problem is None,
        problem=engines.problem,
        endpoints=[
            EngineReadiness(
                ready=engine.failure is None,
                problem=engine.failure,
                address=engine.address,
                in_flight=engine.in_flight,
            )
            for engine in engines.known
        ],
    )


async def _retriever_readiness(client: HealthClient) -> PartReadiness:
    try:
        serving = await client.serving()
    except RagCacheError as error:
        return PartReadiness(ready=False, problem=str(error))
    return PartReadiness(ready=serving, problem=None if serving else "it is not serving yet")
