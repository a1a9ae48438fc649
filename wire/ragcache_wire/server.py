"""gRPC server of every service: access, health, error translation, graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typing_extensions import override

from ragcache_core.errors import RagCacheError
from ragcache_wire.asking import adopt_asker
from ragcache_wire.channel import SERVER_OPTIONS
from ragcache_wire.http_server import HealthServer
from ragcache_wire.message_check import Decoder, MessageCheck
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.peers.peer_access import PeerGuard
from ragcache_wire.peers.peer_channel import add_port
from ragcache_wire.peers.peer_interceptors import PeerInterceptor
from ragcache_wire.status import to_status, trailing_metadata

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""Time that running calls have to finish after a stop."""

MAX_CALLS = 1024
"""Most calls at once. A server refuses further ones with RESOURCE_EXHAUSTED, without decoding them.
Streams count while they are open."""


UnaryCall = Callable[[Any, Any], Awaitable[Any]]
"""Takes a request, or an iterator of requests, and a context. It returns one reply."""
StreamCall = Callable[[Any, Any], AsyncGenerator[Any, None]]


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Puts code around the calls of our services. Subclasses choose which ones and what code."""

    def around_unary(self, method: str, call: UnaryCall) -> UnaryCall:
        """Return what handles calls with one reply instead. ``method`` is a name of the proto."""
        return call

    def around_stream(self, method: str, call: StreamCall) -> StreamCall:
        """Return what handles calls with a stream of replies instead."""
        return call

    def around_decoder(self, decode: Decoder | None) -> Decoder | None:
        """Return what decodes requests instead. None: handlers get bytes."""
        return decode

    @override
    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        # Health raises no core errors.
        if handler is None or not details.method.startswith("/ragcache."):
            return handler
        decode = self.around_decoder(handler.request_deserializer)
        codecs = decode, handler.response_serializer
        method = details.method.rpartition("/")[2]
        if handler.request_streaming and handler.response_streaming:
            raise TypeError(f"{method} streams both ways, and no interceptor handles that")
        if handler.response_streaming:
            stream = self.around_stream(method, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(stream, *codecs)
        if handler.request_streaming:
            unary = self.around_unary(method, handler.stream_unary)
            return grpc.stream_unary_rpc_method_handler(unary, *codecs)
        unary = self.around_unary(method, handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(unary, *codecs)


class AskerInterceptor(CallInterceptor):
    """Makes each call the work of the key that its metadata names (``asking``)."""

    @override
    def around_unary(self, method: str, call: UnaryCall) -> UnaryCall:
        async def adopted(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            adopt_asker(context.invocation_metadata())
            return await call(request, context)

        return adopted

    @override
    def around_stream(self, method: str, call: StreamCall) -> StreamCall:
        async def adopted(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncGenerator[Any, None]:
            adopt_asker(context.invocation_metadata())
            async with contextlib.aclosing(call(request, context)) as replies:
                async for reply in replies:
                    yield reply

        return adopted


class ErrorInterceptor(CallInterceptor):
    """Turns core errors that handlers raise into gRPC statuses, and messages that are none.

    gRPC logs any other exception and answers UNKNOWN.
    """

    def __init__(self) -> None:
        self._messages = MessageCheck()

    @override
    def around_decoder(self, decode: Decoder | None) -> Decoder | None:
        return self._messages.decoder(decode)

    def _checked(self, method: str, request: Any) -> Any:
        """Return a request, or an iterator of them. Raises InvalidInput for what is none."""
        if hasattr(request, "__aiter__"):
            return self._checked_stream(method, request)
        return self._messages.check(method, request)

    async def _checked_stream(self, method: str, requests: Any) -> AsyncGenerator[Any, None]:
        async for request in requests:
            yield self._checked(method, request)

    @override
    def around_unary(self, method: str, call: UnaryCall) -> UnaryCall:
        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await call(self._checked(method, request), context)
            except RagCacheError as error:
                await _abort(context, error)

        return guarded

    @override
    def around_stream(self, method: str, call: StreamCall) -> StreamCall:
        async def guarded(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncGenerator[Any, None]:
            try:
                async for reply in call(self._checked(method, request), context):
                    yield reply
            except RagCacheError as error:
                await _abort(context, error)

        return guarded


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: RagCacheError) -> None:
    code, message, fields = to_status(error)
    await context.abort(code, message, trailing_metadata(fields))


class GrpcServer:
    """A grpc.aio server with health, for callers with a token.

    Health is NOT_SERVING until ``set_ready``. It needs no token.

    Args:
        listen: "host:port". Port 0 takes a free port, which ``port`` then holds.
        services: Full names of the services that ``register`` adds.
        register: Adds the services to the server.
        http_health: A running server that reports the same health over HTTP.
        interceptors: Around the calls of the services. The errors that they raise become statuses.
        credentials: Of the platform. Without keys, only a server on loopback has callers.
    """

    def __init__(
        self,
        listen: str,
        services: Sequence[str],
        register: Callable[[grpc.aio.Server], None],
        http_health: HealthServer | None = None,
        interceptors: Sequence[CallInterceptor] = (),
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._http_health = http_health or HealthServer(None)
        self._server = grpc.aio.server(
            interceptors=[
                PeerInterceptor(PeerGuard(credentials.keys, listen)),
                ErrorInterceptor(),
                AskerInterceptor(),
                *interceptors,
            ],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._services = ("", *services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        register(self._server)
        # Raises RuntimeError when the address is taken.
        self.port = add_port(self._server, listen, credentials)

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
