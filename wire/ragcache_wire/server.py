"""gRPC server of every service: health, reflection, error translation, graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from typing_extensions import override

from ragcache_core.errors import RagCacheError
from ragcache_wire.channel import SERVER_OPTIONS
from ragcache_wire.http_server import HealthServer
from ragcache_wire.status import to_status, trailing_metadata

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""Time that running calls have to finish after a stop."""

MAX_CALLS = 1024
"""Most calls at once. A server refuses further ones with RESOURCE_EXHAUSTED, without decoding them.
Streams count while they are open."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Turns core errors that handlers raise into gRPC statuses.

    gRPC logs any other exception and answers UNKNOWN.
    """

    @override
    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        # Health and reflection raise no core errors, and they stream both ways.
        if handler is None or not details.method.startswith("/ragcache."):
            return handler
        if handler.request_streaming or handler.response_streaming:
            if handler.request_streaming and handler.response_streaming:
                raise NotImplementedError("no service streams both ways")
            if handler.response_streaming:
                return grpc.unary_stream_rpc_method_handler(
                    _guard_stream(handler.unary_stream),
                    handler.request_deserializer,
                    handler.response_serializer,
                )
            return grpc.stream_unary_rpc_method_handler(
                _guard(handler.stream_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            _guard(handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )


def _guard(method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(request, context)
        except RagCacheError as error:
            await _abort(context, error)

    return guarded


def _guard_stream(
    method: Callable[[Any, Any], AsyncIterator[Any]],
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def guarded(
        request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        try:
            async for reply in method(request, context):
                yield reply
        except RagCacheError as error:
            await _abort(context, error)

    return guarded


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: RagCacheError) -> None:
    code, message, fields = to_status(error)
    await context.abort(code, message, trailing_metadata(fields))


class GrpcServer:
    """A grpc.aio server with health and reflection.

    Health is NOT_SERVING until ``set_ready``.

    Args:
        listen: "host:port". Port 0 takes a free port, which ``port`` then holds.
        services: Full names of the services that ``register`` adds.
        register: Adds the services to the server.
        http_health: A running server that reports the same health over HTTP.
        max_calls: Most calls at once.
    """

    def __init__(
        self,
        listen: str,
        services: Sequence[str],
        register: Callable[[grpc.aio.Server], None],
        http_health: HealthServer | None = None,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._http_health = http_health or HealthServer(None)
        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor()],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=max_calls,
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._services = ("", *services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        register(self._server)
        # Raises RuntimeError when the address is taken.
        self.port = self._server.add_insecure_port(listen)

    async def start(self) -> None:
        """Accept calls. Health stays NOT_SERVING."""
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    async def set_ready(self) -> None:
        """Report SERVING to health checks."""
        await self._set(health_pb2.HealthCheckResponse.SERVING)
        self._http_health.set_ready()

    async def set_not_ready(self, problem: str) -> None:
        """Report NOT_SERVING to health checks, with the reason. Calls go on."""
        self._http_health.set_progress(problem)
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self) -> None:
        """Report NOT_SERVING, and cancel the calls that do not finish within STOP_GRACE_S."""
        self._http_health.set_progress("stopping")
        await self._health.enter_graceful_shutdown()
        await self._server.stop(STOP_GRACE_S)

    async def _set(self, status: int) -> None:
        for service in self._services:
            await self._health.set(service, status)


async def until_stopped() -> None:
    """Wait for SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    await stop.wait()
