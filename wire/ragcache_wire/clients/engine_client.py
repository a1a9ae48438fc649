"""Async clients of an engine's records and costs, and of the gRPC health service."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.peers.peer_channel import open_channel
from ragcache_wire.status import from_rpc_error
from ragcache_wire.v1 import engine_pb2 as pb
from ragcache_wire.v1 import engine_pb2_grpc

RECORD_TIMEOUT_S = 1.0
"""The answer is complete without a record, so a caller does not wait long for one."""


class EngineClient:
    """One channel to the engine at address ("host:port").

    Args:
        credentials: With what the client proves that it belongs to the platform.
    """

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._channel = open_channel(address, credentials)
        self._stub = engine_pb2_grpc.EngineStub(self._channel)

    async def close(self) -> None:
        """Close the channel. Calls in flight end at once."""
        await self._channel.close(grace=None)

    async def request_record(
        self, request: str, timeout_s: float = RECORD_TIMEOUT_S
    ) -> pb.RequestRecord:
        """Return the engine's record of a request.

        Raises:
            NotFound: The engine has no record of the request.
            Unavailable: The engine did not answer in time.
        """
        message = pb.GetRequestRecordRequest(request=request)
        try:
            return await self._stub.GetRequestRecord(message, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error("engine", error) from error

    async def costs(self) -> pb.Costs:
        """Return how long prefills and loads take in the engine.

        Raises:
            Unavailable: The engine did not answer in time.
        """
        try:
            return await self._stub.GetCosts(pb.GetCostsRequest(), timeout=RECORD_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error("engine", error) from error


HEALTH_TIMEOUT_S = 1.0


class HealthClient:
    """Client of the health service at address ("host:port")."""

    def __init__(
        self, service: str, address: str, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        self._service = service
        self._channel = open_channel(address, credentials)
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
