"""Stand-ins of the retriever and of the engine's records: real gRPC servers with fixed answers.

A search returns as many chunks as its ``top_k``. Each has as many tokens as the collection's name
says (``chunks-250``), with the token ids that a retriever would have stored at ingest.

Run it as a program: ``python -m bench.support.gateway_load.stand_ins PORT MODEL``.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ragcache_gateway.prompts.tokenizer import ChatTokenizer, load_tokenizer
from ragcache_kv.model.tokenizer import pack_ids
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.server import GrpcServer
from ragcache_wire.settings.part import PartSettings
from ragcache_wire.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    retriever_pb2,
    retriever_pb2_grpc,
)

NUM_CHUNKS = 32
WORDS = ("the", "service", "runs", "in", "region", "north", "and", "a", "team", "since", "last")


class FixedRetriever(retriever_pb2_grpc.RetrieverServicer):
    """Returns the same chunks of a collection to every search."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._chunks: dict[tuple[int, int], retriever_pb2.Chunk] = {}

    def _chunk_of(self, number: int, num_tokens: int) -> retriever_pb2.Chunk:
        if (number, num_tokens) not in self._chunks:
            self._chunks[number, num_tokens] = self._chunk(number, num_tokens)
        return self._chunks[number, num_tokens]

    def _chunk(self, number: int, num_tokens: int) -> retriever_pb2.Chunk:
        choose = random.Random(number)
        separator = self._tokenizer.encode_chunk("")
        # Every word has at least one token.
        text = " ".join(choose.choices(WORDS, k=num_tokens))
        ids = self._tokenizer.encode_chunk(text)[: num_tokens - len(separator)]
        return retriever_pb2.Chunk(
            id=f"document-{number}#0",
            document_id=f"document-{number}",
            title=f"Document {number}",
            text=text,
            token_ids=pack_ids([*ids, *separator]),
            tokenizer_identity=self._tokenizer.identity,
            content_hash=f"hash-{number}",
        )

    async def Search(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        num_tokens = int(request.collection.rpartition("-")[2])
        first = random.randrange(NUM_CHUNKS)
        numbers = [(first + i) % NUM_CHUNKS for i in range(request.top_k)]
        chosen = [self._chunk_of(number, num_tokens) for number in numbers]
        yield retriever_pb2.SearchStage(
            hits=[
                retriever_pb2.Hit(chunk=chunk, score=1 - i / NUM_CHUNKS)
                for i, chunk in enumerate(chosen)
            ],
            final=True,
            progress=1,
        )

    async def ListRemovals(self, request: Any, context: Any) -> Any:  # noqa: N802
        return retriever_pb2.ListRemovalsReply()

    async def ClaimDeletes(self, request: Any, context: Any) -> Any:  # noqa: N802
        return retriever_pb2.ClaimDeletesReply()


class FixedRecords(engine_pb2_grpc.EngineServicer):
    """Returns the same record of every request."""

    async def GetRequestRecord(self, request: Any, context: Any) -> Any:  # noqa: N802
        return engine_pb2.RequestRecord(
            request=request.request, queue_s=0.001, load_s=0.002, prefill_s=0.003, prompt_tokens=100
        )

    async def GetCosts(self, request: Any, context: Any) -> Any:  # noqa: N802
        return engine_pb2.Costs()


async def serve_parts(
    port: int, retriever: FixedRetriever, credentials: Credentials = NO_CREDENTIALS
) -> GrpcServer:
    records = FixedRecords()  # type: ignore[abstract]  # gRPC answers the calls that it lacks

    def register(server: Any) -> None:
        retriever_pb2_grpc.add_RetrieverServicer_to_server(retriever, server)
        engine_pb2_grpc.add_EngineServicer_to_server(records, server)

    names = ["ragcache.v1.Retriever", "ragcache.v1.Engine"]
    server = GrpcServer(f"127.0.0.1:{port}", names, register, credentials=credentials)
    await server.start()
    await server.set_ready()
    return server


async def serve(port: int, model: Path) -> None:
    """Serve until the process is stopped."""
    settings = PartSettings()
    retriever = FixedRetriever(load_tokenizer(model))  # type: ignore[abstract]
    server = await serve_parts(port, retriever, settings.credentials)
    print("serving", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop()  # a server that nothing refers to would end at once


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
