"""Routes of health, readiness, the cache store's status and metrics."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field

from ragcache_core.errors import Unavailable
from ragcache_core.quality.report import Verdict
from ragcache_gateway.http.errors import ErrorDetail
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.readiness import NotReady, Ready, not_ready_message
from ragcache_gateway.http.services import Services
from ragcache_gateway.status.cache import CacheSummary, summarize_cache

router = APIRouter(tags=["status"])


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"] = "alive"


class QualityState(BaseModel):
    """What blended answers are judged by."""

    model: str
    space: str = Field(description="Digest of model, tokenizer and layout of the KV.")
    template: str = Field(description="Digest of the template before the documents.")
    reuse: Literal["exact", "blend"] = Field(description="Default of requests.")
    precompute: bool = Field(description="Whether chunks are computed ahead of questions.")
    wanted_quality: float | None = Field(
        description="Target; without a passing verdict no question is blended. Null: no target."
    )
    max_recompute_share: float
    verdict: Verdict = Field(description="For max_recompute_share.")
    report: dict[str, Any] | None = Field(description="The last report of this model.")


@router.get("/healthz", summary="Whether the process answers")
async def healthz() -> Alive:
    """Report that the process answers; /readyz also checks other parts."""
    return Alive()


@router.get(
    "/readyz",
    summary="Whether the gateway could answer a question",
    response_model=Ready,
    responses={503: {"model": NotReady, "description": "The message names the part."}},
)
async def readyz(services: Services) -> Response | Ready:
    """Ready means: the retriever serves, and an engine has answered since it last failed."""
    parts = await services.readiness.check()
    problem = not_ready_message(parts)
    if problem is None:
        return Ready(parts=parts)
    error = ErrorDetail(
        message=problem, type="service_unavailable_error", param=None, code="not_ready"
    )
    body = NotReady(error=error, parts=parts)
    return JSONResponse(body.model_dump(), 503, {"Retry-After": "1"})


@router.get(
    "/v1/cache",
    summary="What the cache store has, and its hits and misses",
    responses={**ERRORS, **UPSTREAM_ERRORS},
)
async def cache(services: Services) -> CacheSummary:
    """Return sums over the shards that answer; 503 if none does."""
    stats = await services.store.stats()
    if not any(stats.values()):
        raise Unavailable("cachestore", "no shard answers")
    return summarize_cache(stats)


@router.get(
    "/v1/quality",
    summary="What is known of the quality of blended answers",
    responses=ERRORS,
)
async def quality(services: Services) -> QualityState:
    """Return the verdict, and the report that `ragcache quality` has put."""
    return QualityState(
        reuse=services.settings.reuse,
        precompute=services.settings.precompute,
        **services.chat.gate.describe(),
    )


@router.put(
    "/v1/quality/report",
    summary="Put a report of `ragcache quality`",
    responses={**ERRORS, **UPSTREAM_ERRORS},
)
async def put_quality_report(services: Services, report: dict[str, Any]) -> QualityState:
    """Store a report of the served model durably, for all gateways."""
    await services.chat.gate.put_report(report)
    return await quality(services)


@router.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
async def metrics(services: Services) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(
        generate_latest(services.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST}
    )
