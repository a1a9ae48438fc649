"""Typed async client of the gRPC health service that GrpcServer serves."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ragcache_wire.channel import OPTIONS
from ragcache_wire.status import from_rpc_error

HEALTH_TIMEOUT_S = 1.0


class HealthClient:
    """Client of the health service at address ("host:port")."""

    def __init__(self, service: str, address: str) -> None:
        self._service = service
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._stub: Any = health_pb2_grpc.HealthStub(self._channel)

    async def close(self) -> None:
        """Close the channel and cancel running calls."""
        await self._channel.close(grace=None)

    async def serving(self) -> bool:
        """Return whether the service reports SERVING. Raises Unavailable without an answer."""
        try:
            reply = await self._stub.Check(
                health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise from_rpc_error(self._service, error) from error
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
