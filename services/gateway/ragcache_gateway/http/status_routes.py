"""Whether the gateway lives and could answer, and what it counted."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel

from ragcache_core.errors import Unavailable
from ragcache_gateway.http.errors import ErrorDetail
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.wiring import PartsOf
from ragcache_gateway.status.cache import CacheStatus, cache_status
from ragcache_gateway.http.readiness import NotReady, Ready, problem_of

router = APIRouter(tags=["status"])


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"] = "alive"


@router.get("/healthz", summary="Whether the process lives")
async def healthz() -> Alive:
    """Says nothing of other parts; see /readyz."""
    return Alive()


@router.get(
    "/readyz",
    summary="Whether a question could be answered",
    response_model=Ready,
    responses={503: {"model": NotReady, "description": "The message names the part."}},
)
async def readyz(parts: PartsOf) -> Response | Ready:
    """Ready: the retriever serves, and an engine has answered since it last failed."""
    states = await parts.readiness.parts()
    problem = problem_of(states)
    if problem is None:
        return Ready(parts=states)
    error = ErrorDetail(
        message=problem, type="service_unavailable_error", param=None, code="not_ready"
    )
    body = NotReady(error=error, parts=states)
    return JSONResponse(body.model_dump(), 503, {"Retry-After": "1"})


@router.get(
    "/v1/cache",
    summary="What the cache store holds, and how often it had what was asked for",
    responses={**ERRORS, **UPSTREAM_ERRORS},
)
async def cache(parts: PartsOf) -> CacheStatus:
    """Sums over the shards that answer; 503 if none does."""
    stats = await parts.store.stats()
    if not any(stats.values()):
        raise Unavailable("cachestore", "no shard answers")
    return cache_status(stats)


@router.get("/metrics", summary="Counters for Prometheus", response_class=PlainTextResponse)
async def metrics(parts: PartsOf) -> Response:
    """Prometheus' text format."""
    return Response(
        generate_latest(parts.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST}
    )
