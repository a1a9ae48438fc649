"""The application: routes, middleware and the translation of errors."""

from __future__ import annotations

import asyncio
import platform
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match

from ragcache_core.access.json_bounds import question_max_bytes
from ragcache_core.access.networks import AddressRules
from ragcache_core.access.server_names import ServerNames
from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_gateway.admission.quotas import RATE_LIMIT_HEADERS, Quotas
from ragcache_gateway.admission.usage_counter import UsageCounter
from ragcache_gateway.audit.log import AuditLog
from ragcache_gateway.audit.sink import audit_sink
from ragcache_gateway.auth.api_keys import api_keys, tenant_shares
from ragcache_gateway.auth.bearer_tokens import BearerTokens
from ragcache_gateway.auth.issuer_documents import IssuerDocuments
from ragcache_gateway.auth.issuer_keys import IssuerKeys
from ragcache_gateway.console import console_routes
from ragcache_gateway.documents.retriever_errors import to_rest_error
from ragcache_gateway.http.errors import error_body, from_status, from_validation, response_to
from ragcache_gateway.http.json_body import LargeBodies
from ragcache_gateway.http.middleware.access_log import AccessLog
from ragcache_gateway.http.middleware.audit_trail import (
    REQUEST_ID_HEADER,
    AuditGate,
    AuditTrail,
)
from ragcache_gateway.http.middleware.body_limit import BodyLimit, BodyLimits
from ragcache_gateway.http.middleware.browser_guard import BrowserGuard
from ragcache_gateway.http.middleware.concurrency_limit import ConcurrencyLimit
from ragcache_gateway.http.middleware.key_check import KeyCheck, PortGuard
from ragcache_gateway.http.middleware.plain_path import PlainPath
from ragcache_gateway.http.middleware.request_pools import RequestLimit, RequestPools
from ragcache_gateway.http.middleware.request_span import RequestSpans, record_refusal
from ragcache_gateway.http.openapi import describe
from ragcache_gateway.http.query_check import CHECKED_QUERY
from ragcache_gateway.http.routes import (
    backup_routes,
    chat_routes,
    collection_routes,
    document_routes,
    embedding_routes,
    erasure_routes,
    operation_routes,
    response_routes,
    search_routes,
    status_routes,
    usage_routes,
)
from ragcache_gateway.http.server import Drain
from ragcache_gateway.http.services import GatewayServices
from ragcache_gateway.prompts.model_runtime import ModelRuntime
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_gateway.wiring import Shared, connect_services
from ragcache_wire.address_gate import AddressGate
from ragcache_wire.http_server import metrics_server
from ragcache_wire.settings import GatewaySettings
from ragcache_wire.settings.field_types import split_address
from ragcache_wire.telemetry.metric_registry import export_metrics
from ragcache_wire.tracing import tracer
from ragcache_wire.watched.limits import Limits

_ROUTES: Final = (
    chat_routes,
    response_routes,
    embedding_routes,
    erasure_routes,
    document_routes,
    operation_routes,
    collection_routes,
    search_routes,
    backup_routes,
    status_routes,
    usage_routes,
)

EXPOSED_HEADERS: Final = (
    chat_routes.QUALITY_HEADER,
    chat_routes.REUSE_HEADER,
    "Retry-After",
    "Retry-After-Ms",
    REQUEST_ID_HEADER,
    *RATE_LIMIT_HEADERS,
)
"""Headers that pages of allowed origins may read, beside those that every page may."""


def create_app(
    settings: GatewaySettings,
    models: Sequence[ModelRuntime],
    *,
    limits: Limits | None = None,
    metrics: Metrics | None = None,
    drain: Drain | None = None,
) -> FastAPI:
    """Create the gateway. It connects to the other components when it starts.

    Args:
        models: The served models. The first one is of requests that name none.
        limits: Those that the server has, too. None: of the settings.
        metrics: Those that the server has, too. None: new ones.
        drain: What the server announces its stop by. None: it does not.

    Raises:
        InvalidInput: The file of API keys or that of the audit log cannot be used.
    """
    metrics = metrics or Metrics(settings.model_name)
    limits = limits or settings.live_limits()
    keys = api_keys(settings)
    tokens = _bearer_tokens(settings, metrics)
    instance = platform.node()
    sink = audit_sink(settings)
    audit = None if sink is None else AuditLog(sink, instance, metrics)
    spans = tracer(
        settings.otlp_endpoint,
        "gateway",
        instance,
        sample_ratio=settings.trace_sample_ratio,
        exports_content=settings.trace_content,
    )

    usage = UsageCounter()
    shared = Shared(settings, limits, models, metrics, spans, usage)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        exported = export_metrics(settings.otlp_endpoint, "gateway", instance, metrics.registry)
        if audit is not None:
            audit.start()
        try:
            async with (
                metrics_server(settings.metrics_listen, metrics.registry),
                connect_services(shared, keys) as services,
            ):
                app.state.services = services
                yield
        finally:
            await tokens.close()
            if audit is not None:
                await audit.close()
            await asyncio.to_thread(spans.close)
            await asyncio.to_thread(exported.close)

    app = FastAPI(
        title="RagCache",
        version=version("ragcache"),
        summary="Answers from documents, with reuse of the KV cache of retrieved chunks.",
        lifespan=lifespan,
        # FastAPI's pages load code from other hosts; any viewer can read /openapi.json.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.drain = drain or Drain()
    app.openapi = partial(describe, app)  # type: ignore[method-assign]  # FastAPI's documented way
    for routes in _ROUTES:
        app.include_router(routes.router, dependencies=[CHECKED_QUERY])
    if settings.console == "on":
        app.include_router(console_routes.router)
    pools = RequestPools(settings, limits, metrics, tenant_shares(keys))
    # The middleware added last is the outermost.
    app.add_middleware(RequestLimit, pools=pools, quotas=Quotas(usage), metrics=metrics)
    app.state.large_bodies, body_limits = _bodies(settings, models)
    app.add_middleware(BodyLimit, pools=pools, limits=body_limits)
    app.add_middleware(ConcurrencyLimit, pools=pools, usage=usage, metrics=metrics)
    if audit is not None:
        app.add_middleware(AuditGate, log=audit)
    app.add_middleware(KeyCheck, keys=keys, tokens=tokens, names=_server_names(settings))
    if settings.admin_listen is not None:
        app.add_middleware(PortGuard, admin_port=split_address(settings.admin_listen)[1])
    _add_browser_rules(app, settings)
    app.add_middleware(RequestSpans, tracer=spans)
    if audit is not None:
        app.add_middleware(AuditTrail, log=audit)
    app.add_middleware(AccessLog, metrics=metrics)
    app.add_middleware(PlainPath)
    _translate_errors(app, metrics)
    return app


def _add_browser_rules(app: FastAPI, settings: GatewaySettings) -> None:
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST", "PUT", "PATCH", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED_HEADERS,
        )
    own_host, _ = split_address(settings.listen)
    app.add_middleware(
        BrowserGuard,
        hosts=(own_host, *settings.allowed_hosts),
        origins=settings.allowed_origins,
    )


def _bodies(
    settings: GatewaySettings, models: Sequence[ModelRuntime]
) -> tuple[LargeBodies, BodyLimits]:
    """Return what bounds the bodies of requests, by what the models can hold."""
    max_model_len = max(one.served.max_model_len for one in models)
    limits = BodyLimits(
        settings.body_max_bytes,
        min(settings.body_max_bytes, question_max_bytes(max_model_len)),
        settings.body_timeout_s,
    )
    return LargeBodies(max_model_len), limits


def _bearer_tokens(settings: GatewaySettings, metrics: Metrics) -> BearerTokens:
    """Return what finds the callers of tokens."""
    documents = IssuerDocuments(AddressGate(AddressRules(settings.issuer_networks)))
    issuers = [IssuerKeys(one, documents) for one in settings.oidc]
    metrics.issuers_failing.set_function(lambda: sum(one.is_failing for one in issuers))
    return BearerTokens(issuers)


def _server_names(settings: GatewaySettings) -> ServerNames:
    """Return names of servers that all gateways with the same signing key give."""
    signing = settings.signing_key_file
    return ServerNames(secrets.token_bytes(32) if signing is None else signing.current()[0])


def _allowed_methods(request: Request) -> str:
    """Return the methods that a path takes; Starlette names those of its first route only."""
    methods: set[str] = set()
    for routes in _ROUTES:
        for route in routes.router.routes:
            if isinstance(route, APIRoute) and route.matches(request.scope)[0] != Match.NONE:
                methods |= route.methods
    return ", ".join(sorted(methods))


def _translate_errors(app: FastAPI, metrics: Metrics) -> None:
    async def known(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RagCacheError)
        record_refusal(error, metrics)
        if not isinstance(error, Unavailable):
            return response_to(to_rest_error(error))
        services: GatewayServices = request.app.state.services
        return response_to(error, services.component_watch.recovery_s(error.component))

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return response_to(from_validation(error.errors()))

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        # FastAPI wraps every error of reading a body, those of BodyLimit included.
        if isinstance(error.__cause__, RagCacheError):
            record_refusal(error.__cause__, metrics)
            return response_to(error.__cause__)
        http = from_status(error.status_code, request.method, request.url.path, str(error.detail))
        headers = dict(error.headers or {})
        if http.status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = _allowed_methods(request)
        return JSONResponse(http.body, http.status, headers)

    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        body = error_body("an internal error; the log has more", "server_error", code="internal")
        return JSONResponse(body, 500)

    app.add_exception_handler(RagCacheError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(Exception, unexpected)
