"""A retriever as a process of its own, with a small embedder: it starts in seconds.

Removals take many small transactions, so that a kill often comes between two of them.

Usage: python -m tests.kit.retriever_process FOLDER MODEL. It writes its port.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ragcache_retriever.knowledge_base import collections, remake
from ragcache_retriever.service import SERVICE_NAME, RetrieverService
from ragcache_retriever.store.sqlite.files.backup import SqliteBackups
from ragcache_wire.server import GrpcServer, until_stopped
from ragcache_wire.v1 import retriever_pb2_grpc
from tests.kit.retriever import make_knowledge_base, tokenizer_of

REMOVED_CHUNKS = 4
"""Chunks that one transaction removes."""


async def serve(folder: Path, model: Path) -> None:
    knowledge_base = make_knowledge_base(folder, tokenizer_of(model))
    service = RetrieverService(knowledge_base, backups=SqliteBackups(folder))
    server = GrpcServer(
        "127.0.0.1:0",
        [SERVICE_NAME],
        lambda server: retriever_pb2_grpc.add_RetrieverServicer_to_server(service, server),
    )
    await server.start()
    await knowledge_base.load()
    await server.set_ready()
    print(server.port, flush=True)
    await until_stopped()
    await server.stop()
    await knowledge_base.close()


if __name__ == "__main__":
    collections.REMOVED_AT_ONCE = REMOVED_CHUNKS
    remake.REMOVED_AT_ONCE = REMOVED_CHUNKS  # type: ignore[attr-defined]
    remake.RETIRED_AT_ONCE = REMOVED_CHUNKS
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
