"""Whether a question could be answered now, and which part is in the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from ragcache_core.errors import RagCacheError
from ragcache_gateway.engines.pool import Engines
from ragcache_gateway.http.errors import ErrorDetail
from ragcache_wire.clients.health_client import HealthClient


class PartState(BaseModel):
    """One part the gateway depends on."""

    ready: bool
    problem: str | None = None


class EngineState(PartState):
    """One engine, by the address of its server."""

    address: str
    in_flight: int = Field(description="Requests of this gateway that it is answering.")


class EnginesState(PartState):
    """All engines: ready if one of them is."""

    endpoints: list[EngineState]


class States(BaseModel):
    """The parts that answers need."""

    retriever: PartState
    engine: EnginesState


class Ready(BaseModel):
    """Every part that answers need is ready."""

    status: Literal["ready"] = "ready"
    parts: States


class NotReady(BaseModel):
    """A part that answers need is not ready."""

    error: ErrorDetail = Field(description="The message names the part.")
    parts: States


@dataclass(frozen=True, slots=True)
class Readiness:
    """Looks at the retriever when asked, and at what the engines did last."""

    engines: Engines
    retriever: HealthClient

    async def parts(self) -> States:
        """State of every part that answers need."""
        return States(retriever=await _state(self.retriever), engine=_engines_state(self.engines))


def problem_of(parts: States) -> str | None:
    """One line that names the parts which are not ready; None if all are."""
    return (
        "; ".join(
            f"the {name} is not ready: {state.problem}"
            for name, state in (("retriever", parts.retriever), ("engine", parts.engine))
            if not state.ready
        )
        or None
    )


def _engines_state(engines: Engines) -> EnginesState:
    return EnginesState(
        ready=engines.problem is None,
        problem=engines.problem,
        endpoints=[
            EngineState(
                ready=engine.failure is None,
                problem=engine.failure,
                address=engine.address,
                in_flight=engine.in_flight,
            )
            for engine in engines.known
        ],
    )


async def _state(client: HealthClient) -> PartState:
    try:
        serving = await client.serving()
    except RagCacheError as error:
        return PartState(ready=False, problem=str(error))
    return PartState(ready=serving, problem=None if serving else "it is not serving yet")
