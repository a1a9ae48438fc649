"""Async client of the feed of an engine or of a shard of the cache store."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final

import grpc
import grpc.aio

from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.peers.peer_channel import open_channel
from ragcache_wire.status import from_rpc_error
from ragcache_wire.v1 import cachestore_pb2, engine_pb2
from ragcache_wire.v1 import node_feed_pb2 as pb

ENGINE_FEED: Final = f"/{engine_pb2.DESCRIPTOR.services_by_name['Engine'].full_name}/Watch"
SHARD_FEED: Final = f"/{cachestore_pb2.DESCRIPTOR.services_by_name['CacheStore'].full_name}/Watch"


class FeedNotServed(Exception):
    """The source has no feed: it is of another version, or no service of RagCache."""


class FeedClient:
    """One channel to a source at address ("host:port").

    Args:
        method: ENGINE_FEED or SHARD_FEED.
        credentials: With what the client proves that it belongs to the platform.
        reader: Name in the numbers of the caller's requests. Empty: it sends the engine none.
    """

    def __init__(
        self, address: str, method: str, credentials: Credentials = NO_CREDENTIALS, reader: str = ""
    ) -> None:
        self._channel = open_channel(address, credentials)
        self._reader = reader
        self._watch: Any = self._channel.unary_stream(
            method,
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.NodeChanges.FromString,
        )

    async def close(self) -> None:
        """Close the channel. Calls in flight end at once."""
        await self._channel.close(grace=None)

    async def watch(
        self, boot: bytes = b"", after: int = 0
    ) -> AsyncGenerator[pb.NodeChanges, None]:
        """Yield the source's messages until it ends the call.

        A reader that is slow holds the source back, which then sends a snapshot.

        Args:
            boot: Continue after a change of this boot, if the source still has what follows.
                Otherwise a snapshot comes first.
            after: Number of that change.

        Raises:
            Unauthenticated: The source does not accept the token.
            FeedNotServed: It has no feed.
            Unavailable: It does not answer, or has gone away.
        """
        request = pb.WatchRequest(boot=boot, after=after, reader=self._reader)
        call = self._watch(request)
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            if isinstance(error, grpc.aio.AioRpcError) and (
                error.code() is grpc.StatusCode.UNIMPLEMENTED
            ):
                raise FeedNotServed(error.details()) from error
            raise from_rpc_error("feed", error) from error
        finally:
            call.cancel()
