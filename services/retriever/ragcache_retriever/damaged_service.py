"""The gRPC service while the documents cannot be read: it restores a backup and nothing else."""

# ruff: noqa: N802  methods are named as in the proto

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from ragcache_core.errors import RagCacheError
from ragcache_retriever.messages.backups import received_backup
from ragcache_retriever.store.copies import Copies
from ragcache_wire.v1 import retriever_pb2 as pb
from ragcache_wire.v1 import retriever_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class DamagedService(retriever_pb2_grpc.RetrieverServicer):
    """Answers all calls but Restore with the problem.

    Args:
        restored: Called after a restore. The process then ends and is started again.
    """

    def __init__(
        self, problem: RagCacheError, copies: Copies, restored: Callable[[], None]
    ) -> None:
        self._copies = copies
        self._restored = restored

        async def refuse(request: Any, context: Context) -> Any:
            raise problem

        async def refuse_stream(request: Any, context: Context) -> AsyncIterator[Any]:
            raise problem
            yield

        for method in pb.DESCRIPTOR.services_by_name["Retriever"].methods:
            if method.name != "Restore":
                setattr(self, method.name, refuse_stream if method.server_streaming else refuse)

    async def Restore(
        self, request: AsyncIterator[pb.BackupPart], context: Context
    ) -> pb.RestoreReply:
        """Receive a backup for the next start."""
        num_documents = await received_backup(self._copies, request)
        asyncio.get_running_loop().call_later(0.5, self._restored)
        return pb.RestoreReply(documents=num_documents)
