"""Whether a question could be answered now, and which part is in the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from ragcache_core.errors import RagCacheError
from ragcache_gateway.engine import Engine
from ragcache_gateway.errors import ErrorDetail
from ragcache_wire.health_client import HealthClient


class PartState(BaseModel):
    """One part the gateway depends on."""

    ready: bool
    problem: str | None = None


class Ready(BaseModel):
    """Every part that answers need is ready."""

    status: Literal["ready"] = "ready"
    parts: dict[str, PartState]


class NotReady(BaseModel):
    """A part that answers need is not ready."""

    error: ErrorDetail = Field(description="The message names the part.")
    parts: dict[str, PartState]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Looks at the retriever when asked, and at what the engine did last."""

    engine: Engine
    retriever: HealthClient

    async def parts(self) -> dict[str, PartState]:
        """State of every part that answers need."""
        return {"retriever": await _state(self.retriever), "engine": _engine_state(self.engine)}


def problem_of(parts: Mapping[str, PartState]) -> str | None:
    """One line that names the parts which are not ready; None if all are."""
    return (
        "; ".join(
            f"the {name} is not ready: {state.problem}"
            for name, state in parts.items()
            if not state.ready
        )
        or None
    )


def _engine_state(engine: Engine) -> PartState:
    return PartState(ready=engine.failure is None, problem=engine.failure)


async def _state(client: HealthClient) -> PartState:
    try:
        serving = await client.serving()
    except RagCacheError as error:
        return PartState(ready=False, problem=str(error))
    return PartState(ready=serving, problem=None if serving else "it is not serving yet")
