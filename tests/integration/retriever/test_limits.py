"""Searches and documents above the limits are refused, and ended requests count no longer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from ragcache_core.errors import Overloaded
from ragcache_retriever.embedding.embedder import Vectors
from ragcache_retriever.interceptors import LimitInterceptor
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.retriever import (
    WordEmbedder,
    make_knowledge_base,
    serving,
    tokenizer_of,
)
from tests.kit.wait import until


@dataclass
class WaitingEmbedder(WordEmbedder):
    """Embeds only while it is open, and counts the calls that wait."""

    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiting: int = 0
    num_calls: int = 0

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        self.num_waiting += 1
        self.num_calls += 1
        try:
            await self.is_open.wait()
        finally:
            self.num_waiting -= 1
        return await super().embed(texts, urgent=urgent)


@pytest.fixture
def embedder() -> WaitingEmbedder:
    return WaitingEmbedder()


@pytest_asyncio.fixture
async def client(
    tmp_path: Path, tiny_model: Path, embedder: WaitingEmbedder
) -> AsyncIterator[RetrieverClient]:
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    limits = LimitInterceptor(max_searches=1, max_upsert_bytes=2000)
    async with serving(knowledge_base, limits) as client:
        yield client


async def until_waiting(embedder: WaitingEmbedder, count: int) -> None:
    await until(lambda: embedder.num_waiting == count, f"{count} calls that wait")


async def search(client: RetrieverClient) -> pb.SearchStage:
    *_, last = [stage async for stage in client.search("default", "pager", 1)]
    return last


async def test_a_search_over_the_limit_is_refused(
    client: RetrieverClient, embedder: WaitingEmbedder
) -> None:
    first = asyncio.create_task(search(client))
    await until_waiting(embedder, 1)
    with pytest.raises(Overloaded, match="1 searches are running") as refused:
        await search(client)
    assert refused.value.retry_after_s > 0
    embedder.is_open.set()
    assert (await first).final


async def test_a_search_whose_deadline_passes_ends_and_makes_room(
    client: RetrieverClient, embedder: WaitingEmbedder
) -> None:
    request = pb.SearchRequest(collection="default", query="pager", top_k=1)
    for timeout_s in (1.0, 4.0, 16.0, 64.0):  # until one reaches the embedder in time
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await anext(aiter(client._stub.Search(request, timeout=timeout_s)))
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if embedder.num_calls:
            break
    # The server has ended the work, too.
    await until_waiting(embedder, 0)
    embedder.is_open.set()

    async def has_room() -> bool:
        with contextlib.suppress(Overloaded):
            return (await search(client)).final
        return False

    await until(has_room)


async def test_documents_that_are_prepared_are_bounded_by_their_bytes(
    client: RetrieverClient, embedder: WaitingEmbedder
) -> None:
    def upsert(name: str) -> asyncio.Task[pb.UpsertDocumentReply]:
        document = pb.Document(collection="default", id=name, text=f"{name} " * 200)
        return asyncio.create_task(client.upsert_document(document))

    first = upsert("a")
    await until_waiting(embedder, 1)
    second = upsert("longer-name")
    with pytest.raises(Overloaded, match="it is preparing"):
        await second
    embedder.is_open.set()
    assert (await first).changed
    assert (await upsert("longer-name")).changed
