"""The gRPC service while the documents cannot be read: it restores a backup and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from ragcache_core.errors import RagCacheError
from ragcache_retriever.messages.backups import received_backup
from ragcache_retriever.store.sqlite.files.backup import SqliteBackups
from ragcache_wire.v1 import retriever_pb2 as pb
from ragcache_wire.v1 import retriever_pb2_grpc

RESTART_DELAY_S = 0.5
"""Time to send the reply."""

Context = grpc.aio.ServicerContext[Any, Any]


def damaged_service(
    problem: RagCacheError, backups: SqliteBackups, restored: Callable[[], None]
) -> retriever_pb2_grpc.RetrieverServicer:
    """Return a service that answers all calls but Restore with the problem.

    Args:
        restored: Called after a restore. The process then ends and is started again.
    """

    async def refuse(self: object, request: Any, context: Context) -> Any:
        # Else the error would keep what each of its calls held.
        raise problem.with_traceback(None)

    async def refuse_stream(self: object, request: Any, context: Context) -> AsyncIterator[Any]:
        raise problem.with_traceback(None)
        yield

    async def restore(
        self: object, request: AsyncIterator[pb.BackupPart], context: Context
    ) -> pb.RestoreReply:
        num_documents = await received_backup(backups, request)
        asyncio.get_running_loop().call_later(RESTART_DELAY_S, restored)
        return pb.RestoreReply(documents=num_documents)

    methods = {
        method.name: refuse_stream if method.server_streaming else refuse
        for method in pb.DESCRIPTOR.services_by_name["Retriever"].methods
    }
    bases = (retriever_pb2_grpc.RetrieverServicer,)
    service: retriever_pb2_grpc.RetrieverServicer = type(
        "DamagedService", bases, {**methods, "Restore": restore}
    )()
    return service
