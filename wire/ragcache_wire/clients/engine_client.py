"""Async client of the service that an engine offers for its records and costs."""

from __future__ import annotations

import grpc
import grpc.aio

from ragcache_wire.channel import OPTIONS
from ragcache_wire.status import from_rpc_error
from ragcache_wire.v1 import engine_pb2 as pb
from ragcache_wire.v1 import engine_pb2_grpc

RECORD_TIMEOUT_S = 1.0
"""The answer is complete without a record, so a caller does not wait long for one."""


class EngineClient:
    """One channel to the engine at address ("host:port")."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
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
