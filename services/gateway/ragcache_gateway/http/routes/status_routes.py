"""Routes of health, readiness, metrics, and of what is cached."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field

from ragcache_core.access.caller import Scope
from ragcache_core.errors import Unavailable
from ragcache_core.quality.report import Verdict
from ragcache_gateway.explain.tree_outline import DEFAULT_OUTLINED, MAX_OUTLINED, TreeOutline
from ragcache_gateway.http.component_watch import Answering, NotAnswering, not_ready_message
from ragcache_gateway.http.errors import ErrorDetail, retry_headers
from ragcache_gateway.http.json_body import JsonRoute
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.server import Drain
from ragcache_gateway.http.services import Asking, GatewayServices, Services
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.shown_address import shown
from ragcache_gateway.telemetry.cache import CacheSummary, summarize_cache
from ragcache_wire.telemetry.metric_registry import exposition

router = APIRouter(route_class=JsonRoute, tags=["status"])


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"] = "alive"


class Ready(BaseModel):
    """The gateway answers requests."""

    status: Literal["ready"] = "ready"


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
    lossy_precisions: list[str] = Field(
        description="Lossy precisions of spec.cacheStore.precision, as codecs of keys and values."
    )
    lossy_verdict: Verdict | None = Field(
        description="Whether values in these precisions are blended. Null: there are none."
    )
    report: dict[str, Any] | None = Field(description="The last report of this model.")


@router.get("/health", summary="The same as /healthz, by vLLM's name")
@router.get("/healthz", summary="Whether the process answers")
async def healthz() -> Alive:
    """Report that the process answers."""
    return Alive()


@router.get("/readyz", summary="Whether the gateway answers requests", responses=UPSTREAM_ERRORS)
async def readyz(request: Request) -> Ready:
    """Report ready while requests are accepted: a part that is down must not hide the others.

    /v1/status says whether questions can be answered.
    """
    drain: Drain = request.app.state.drain
    if drain.has_begun:
        raise Unavailable("gateway", "it is about to stop")
    return Ready()


@router.get(
    "/v1/status",
    summary="Whether questions can be answered, and which part prevents it",
    response_model=Answering,
    responses={
        **ERRORS,
        503: {"model": NotAnswering, "description": "The message names the part."},
    },
)
async def status(services: Services) -> Response | Answering:
    """Questions need a retriever that serves, and an engine that answered since it last failed."""
    watch = services.component_watch
    parts = watch.parts
    problem = not_ready_message(parts)
    if problem is None:
        return Answering(parts=parts)
    error = ErrorDetail(
        message=shown(problem), type="service_unavailable_error", param=None, code="not_ready"
    )
    body = NotAnswering(error=error, parts=parts)
    return JSONResponse(body.model_dump(), 503, retry_headers(watch.longest_recovery_s))


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
    return summarize_cache(stats, services.cache_view.summarize())


AskedModel = Annotated[
    str | None, Query(description="The model. Without it, the one of requests that name none.")
]


@router.get(
    "/v1/quality",
    summary="What is known of the quality of blended answers",
    responses=ERRORS,
)
async def quality(services: Services, model: AskedModel = None) -> QualityState:
    """Return the verdict of a model, and the report that `ragcache quality` has put."""
    return _quality(services, services.chat_with(model))


def _quality(services: GatewayServices, chat: ChatServices) -> QualityState:
    return QualityState(
        reuse=services.settings.reuse,
        precompute=services.settings.precompute,
        **chat.gate.describe(),
    )


@router.put(
    "/v1/quality/report",
    summary="Put a report of `ragcache quality`",
    responses={**ERRORS, **UPSTREAM_ERRORS},
)
async def put_quality_report(services: Services, report: dict[str, Any]) -> QualityState:
    """Store a report of a served model durably, for all gateways.

    The report names the model.
    """
    name = report.get("model")
    chat = services.chat_with(name if isinstance(name, str) else None)
    await chat.gate.put_report(report)
    return _quality(services, chat)


@router.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
async def metrics(services: Services, request: Request) -> Response:
    """Return the metrics in the format of Prometheus or OpenMetrics that the client accepts."""
    accept = request.headers.get("accept", "")
    content_type, body = await asyncio.to_thread(exposition, services.metrics.registry, accept)
    return Response(body, headers={"content-type": content_type})


MaxNodes = Annotated[int, Query(ge=1, le=MAX_OUTLINED, description="Most nodes to return.")]


@router.get(
    "/v1/cache/tree",
    summary="The most used chunks, and in which tiers their KV is",
    responses=ERRORS,
)
async def cache_tree(
    services: Services, caller: Asking, limit: MaxNodes = DEFAULT_OUTLINED
) -> TreeOutline:
    """Return the hottest nodes of this gateway's knowledge tree, with all nodes before them.

    Without the scope admin, only nodes of the caller's own tenant have a name and a key.
    """
    return await services.tree_reader.read(
        limit, caller.tenant, of_any_tenant=caller.may(Scope.ADMIN)
    )
