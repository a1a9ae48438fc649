"""The gRPC service of a replica: it forwards writes to the writer and answers reads itself."""

# ruff: noqa: N802  methods are named as in the proto

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
import grpc.aio

from ragcache_core.cluster.writer_election import LogPosition
from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.replication.change_feed import LogsDiffer
from ragcache_retriever.replication.replica import Replica
from ragcache_wire.channel import PART_BYTES
from ragcache_wire.status import from_rpc_error
from ragcache_wire.v1 import retriever_pb2 as pb

Q = TypeVar("Q")
R = TypeVar("R")
Context = grpc.aio.ServicerContext[Any, Any]

FORWARDED_S = 300.0
"""Longest forwarded call whose caller has set no deadline."""


class ReplicatedService:
    """Wraps the service of one retriever. Calls that are not named here go to it unchanged.

    Args:
        inner: The service of this replica's documents.
    """

    def __init__(self, inner: Any, replica: Replica) -> None:
        self._inner = inner
        self._replica = replica

    def __getattr__(self, name: str) -> Any:
        """Return a method of the wrapped service."""
        return getattr(self._inner, name)

    async def PutCollection(self, request: pb.PutCollectionRequest, context: Context) -> Any:
        """Create or change a collection, at the writer."""
        return await self._write("PutCollection", request, context)

    async def DeleteCollection(self, request: pb.DeleteCollectionRequest, context: Context) -> Any:
        """Delete a collection, at the writer."""
        return await self._write("DeleteCollection", request, context)

    async def UpsertDocument(self, request: pb.UpsertDocumentRequest, context: Context) -> Any:
        """Insert or replace a document, at the writer."""
        return await self._write("UpsertDocument", request, context)

    async def DeleteDocument(self, request: pb.DeleteDocumentRequest, context: Context) -> Any:
        """Delete a document, at the writer."""
        return await self._write("DeleteDocument", request, context)

    async def ClaimDeletes(self, request: pb.ClaimDeletesRequest, context: Context) -> Any:
        """Return deletes to send, from the writer's outbox."""
        return await self._write("ClaimDeletes", request, context)

    async def AcknowledgeDeletes(
        self, request: pb.AcknowledgeDeletesRequest, context: Context
    ) -> Any:
        """Record acknowledgements in the writer's outbox."""
        return await self._write("AcknowledgeDeletes", request, context)

    async def PutReport(self, request: pb.PutReportRequest, context: Context) -> Any:
        """Store a report, at the writer."""
        return await self._write("PutReport", request, context)

    async def ListRemovals(self, request: pb.ListRemovalsRequest, context: Context) -> Any:
        """Return removals from the writer that a majority has.

        Background work removes text without waiting for a majority. If a new writer lacked a
        removal that a gateway knows, it would give the same sequence number to another one.
        """
        if not self._replica.is_writer:
            return await self._forward("ListRemovals", request, context)
        reply = await self._inner.ListRemovals(request, context)
        await self._replica.confirm(settles=False)
        return reply

    async def Restore(self, request: AsyncIterator[pb.BackupPart], context: Context) -> Any:
        """Refuse: the other replicas would replace the restored documents by their own."""
        raise InvalidInput(
            "replicas", "a retriever with replicas cannot be restored", "restore into one replica"
        )

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.RetrieverStatus:
        """Return the state of this replica, also while it loads."""
        try:
            status: pb.RetrieverStatus = await self._inner.GetStatus(request, context)
        except Unavailable:
            status = pb.RetrieverStatus()
        replica, position = self._replica, self._replica.position()
        status.role = (
            pb.RetrieverStatus.ROLE_WRITER
            if replica.is_writer
            else pb.RetrieverStatus.ROLE_FOLLOWER
        )
        status.writer = replica.writer
        status.epoch, status.sequence = position.epoch, position.sequence
        status.writer_sequence = replica.writer_sequence
        status.lag_s = replica.lag_s
        if replica.is_writer:
            status.followers.extend(
                pb.FollowerStatus(address=address, sequence=sequence)
                for address, sequence in sorted(replica.feed.followers().items())
            )
        return status

    async def FollowChanges(
        self, request: pb.FollowChangesRequest, context: Context
    ) -> AsyncIterator[pb.Change]:
        """Send changes to a follower, large ones in parts."""
        position = LogPosition(request.epoch, request.after)
        follow = self._replica.feed.follow(request.follower, position, request.writer_epoch)
        try:
            async with contextlib.aclosing(follow) as changes:
                async for change in changes:
                    for start in range(0, max(len(change.statements), 1), PART_BYTES):
                        end = start + PART_BYTES
                        yield pb.Change(
                            sequence=change.sequence,
                            epoch=change.epoch,
                            statements=change.statements[start:end],
                            committed_unix_ms=change.committed_unix_ms,
                            more=end < len(change.statements),
                        )
        except LogsDiffer as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def AcknowledgeChanges(
        self, request: pb.AcknowledgeChangesRequest, context: Context
    ) -> pb.AcknowledgeChangesReply:
        """Note which changes a follower has."""
        position = LogPosition(request.epoch, request.sequence)
        self._replica.feed.acknowledge(request.follower, position, request.writer_epoch)
        return pb.AcknowledgeChangesReply()

    async def _write(self, method: str, request: Any, context: Context) -> Any:
        """Call the writer. Its own changes are acknowledged when a majority has them."""
        if not self._replica.is_writer:
            return await self._forward(method, request, context)
        reply = await getattr(self._inner, method)(request, context)
        # Also after a repetition, which changes nothing: a majority may lack the first change.
        await self._replica.confirm()
        return reply

    async def _forward(self, method: str, request: Any, context: Context) -> Any:
        """Call the writer with the caller's deadline. Raises its error."""
        client = self._replica.client_of_writer()
        remaining_s = context.time_remaining()
        call = client.forward(method)
        try:
            return await call(request, timeout=min(remaining_s or FORWARDED_S, FORWARDED_S))
        except grpc.RpcError as error:
            raise from_rpc_error("retriever", error) from error
