"""Interceptors of gRPC servers that admit only calls with a token, before a message is read."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health
from typing_extensions import override

from ragcache_core.errors import Unauthenticated
from ragcache_wire.peers.peer_access import PeerGuard
from ragcache_wire.status import to_status, trailing_metadata

_OPEN = f"/{health.SERVICE_NAME}/"
"""Health checks need no token: those of Kubernetes cannot send one, and they tell nothing else."""


class PeerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Admits calls to a server of grpc.aio."""

    def __init__(self, guard: PeerGuard) -> None:
        self._guard = guard

    @override
    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        error = _problem(self._guard, details)
        if error is None:
            return await continuation(details)
        code, message, fields = to_status(error)

        async def refuse(_: Any, context: Any) -> None:
            await context.abort(code, message, trailing_metadata(fields))

        return _refusal(refuse)


class BlockingPeerInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Admits calls to a server with threads."""

    def __init__(self, guard: PeerGuard) -> None:
        self._guard = guard

    @override
    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        error = _problem(self._guard, handler_call_details)
        if error is None:
            return continuation(handler_call_details)
        code, message, fields = to_status(error)

        def refuse(_: Any, context: Any) -> NoReturn:
            context.set_trailing_metadata(trailing_metadata(fields))
            context.abort(code, message)
            raise AssertionError("abort raises")

        return _refusal(refuse)


def _problem(guard: PeerGuard, details: Any) -> Unauthenticated | None:
    """Return why a call is not admitted. None: it is."""
    if details.method.startswith(_OPEN):
        return None
    try:
        guard.check(details.method, details.invocation_metadata)
    except Unauthenticated as error:
        return error
    return None


def _refusal(refuse: Any) -> Any:
    # gRPC reads no message for a handler of streams until the handler asks for one.
    return grpc.stream_unary_rpc_method_handler(refuse)
