"""Limits and metrics of calls through a real gRPC server, with a service that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ragcache_core.errors import InvalidInput, NotFound, Overloaded, Unavailable
from ragcache_retriever.interceptors import LimitInterceptor, MetricsInterceptor
from ragcache_retriever.metrics import Metrics
from ragcache_wire.asking import asking
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.server import GrpcServer
from ragcache_wire.v1 import retriever_pb2 as pb
from ragcache_wire.v1 import retriever_pb2_grpc
from tests.kit.wait import until

WAIT_S = 20.0
DOCUMENT = pb.Document(collection="c", id="a", text="four")
UPSERT_BYTES = pb.UpsertDocumentRequest(document=DOCUMENT).ByteSize()


class ScriptedService(retriever_pb2_grpc.RetrieverServicer):
    """Answers, raises, or waits until it is released. ``num_waiting`` counts what waits."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.changed = True
        self.released = asyncio.Event()
        self.released.set()
        self.num_waiting = 0

    async def Search(self, request: Any, context: Any) -> AsyncIterator[pb.SearchStage]:  # noqa: N802
        yield pb.SearchStage(hits=[pb.Hit()])
        await self._act()
        yield pb.SearchStage(hits=[pb.Hit()])
        yield pb.SearchStage(hits=[pb.Hit()] * 2, final=True, embed_us=2_000_000, search_us=500_000)

    async def Embed(self, request: Any, context: Any) -> pb.EmbedReply:  # noqa: N802
        await self._act()
        return pb.EmbedReply()

    async def Rerank(self, request: Any, context: Any) -> pb.RerankReply:  # noqa: N802
        await self._act()
        return pb.RerankReply()

    async def UpsertDocument(self, request: Any, context: Any) -> pb.UpsertDocumentReply:  # noqa: N802
        await self._act()
        return pb.UpsertDocumentReply(changed=self.changed, document=pb.Document(num_chunks=3))

    async def DeleteDocument(self, request: Any, context: Any) -> pb.DeleteDocumentReply:  # noqa: N802
        await self._act()
        return pb.DeleteDocumentReply()

    async def GetCollection(self, request: Any, context: Any) -> pb.Collection:  # noqa: N802
        return pb.Collection(name=request.name)

    async def _act(self) -> None:
        self.num_waiting += 1
        try:
            await self.released.wait()
        finally:
            self.num_waiting -= 1
        if self.error is not None:
            raise self.error


class Server:
    """A server with limits and metrics, its client and its service."""

    def __init__(self, service: ScriptedService, metrics: Metrics, client: RetrieverClient) -> None:
        self.service = service
        self.metrics = metrics
        self.client = client

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.collectors.get_sample_value(f"ragcache_retriever_{name}", labels)

    async def search(self) -> list[pb.SearchStage]:
        return [stage async for stage in self.client._stub.Search(pb.SearchRequest())]

    async def until(self, name: str, outcome: str) -> None:
        """Wait for the count of one call, which may follow its reply."""
        async with asyncio.timeout(WAIT_S):
            while not self.value(name, outcome=outcome):  # noqa: ASYNC110  it has no event
                await asyncio.sleep(0.005)
        assert self.value(name, outcome=outcome) == 1

    async def until_waiting(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.service.num_waiting != count:  # noqa: ASYNC110  it has no event
                await asyncio.sleep(0.005)

    async def calls(self) -> None:
        """Make one call of each kind that is limited as a search."""
        await self.search()
        await self.client._stub.Embed(pb.EmbedRequest())
        await self.client._stub.Rerank(pb.RerankRequest())


@contextlib.asynccontextmanager
async def serving(max_searches: int = 2, max_upsert_bytes: int = 1000) -> AsyncIterator[Server]:
    metrics = Metrics()
    service = ScriptedService()  # type: ignore[abstract]
    server = GrpcServer(
        "127.0.0.1:0",
        ["test"],
        lambda server: retriever_pb2_grpc.add_RetrieverServicer_to_server(service, server),
        interceptors=(
            MetricsInterceptor(metrics),
            LimitInterceptor(max_searches, max_upsert_bytes),
        ),
    )
    await server.start()
    client = RetrieverClient(f"127.0.0.1:{server.port}")
    try:
        yield Server(service, metrics, client)
    finally:
        await client.close()
        await server.stop()


async def test_searches_are_refused_above_the_limit_and_count_no_longer_once_they_end() -> None:
    async with serving(max_searches=2) as server:
        server.service.released.clear()
        stages = server.client.search("c", "q", 1)
        embedding = asyncio.ensure_future(server.client._stub.Embed(pb.EmbedRequest()))
        assert not (await anext(stages)).final
        await server.until_waiting(2)
        for refused in (server.client.embed(["a"]), server.client.rerank("a", ["b"])):
            with pytest.raises(Overloaded, match="2 searches are running") as raised:
                await refused
            assert raised.value.retry_after_s > 0
        with pytest.raises(Overloaded, match="2 searches are running"):
            await anext(server.client.search("c", "q", 1))
        other = await server.client._stub.GetCollection(pb.GetCollectionRequest(name="c"))
        assert other.name == "c", "other calls have no limit"
        # A caller that leaves makes room, too.
        await stages.aclose()
        embedding.cancel()
        await server.until_waiting(0)
        server.service.released.set()
        await server.calls()
        await server.until("searches_total", "cancelled")
        await server.until("searches_total", "refused")
        await server.until("searches_total", "answered")


async def test_a_search_that_fails_counts_no_longer() -> None:
    async with serving(max_searches=1) as server:
        server.service.error = Unavailable("embedder", "gone")
        for _ in range(3):
            with pytest.raises(Unavailable, match="gone"):
                await server.client.embed(["a"])
        server.service.error = None
        await server.calls()


async def test_upserts_are_bounded_by_their_bytes_and_a_large_one_runs_alone() -> None:
    for limit, at_once in ((2 * UPSERT_BYTES, 2), (UPSERT_BYTES // 2, 1)):
        async with serving(max_upsert_bytes=limit) as server:
            server.service.released.clear()
            running = [
                asyncio.ensure_future(server.client.upsert_document(DOCUMENT))
                for _ in range(at_once)
            ]
            await server.until_waiting(at_once)
            with pytest.raises(Overloaded, match=f"preparing {at_once * UPSERT_BYTES} bytes"):
                await server.client.upsert_document(DOCUMENT)
            server.service.released.set()
            await asyncio.gather(*running)
            assert (await server.client.upsert_document(DOCUMENT)).changed


async def test_a_search_is_counted_with_its_stages_and_times() -> None:
    async with serving() as server:
        await server.search()
        await server.until("searches_total", "answered")
        assert server.value("search_duration_seconds_sum", part="embed") == 2
        assert server.value("search_duration_seconds_sum", part="search") == 0.5
        assert server.value("search_duration_seconds_count", part="total") == 1
        assert server.value("search_hits_total") == 2
        for stage in ("first", "between", "final"):
            assert server.value("search_stages_total", stage=stage) == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Overloaded("retriever", "busy", 1.0), "refused"),
        (InvalidInput("query", "is empty", "write one"), "invalid"),
        (NotFound("document", "a", "list them"), "invalid"),
        (Unavailable("embedder", "gone"), "unavailable"),
        (RuntimeError("unforeseen"), "failed"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else one,
)
async def test_a_failed_call_is_counted_by_its_reason(error: Exception, outcome: str) -> None:
    async with serving() as server:
        server.service.error = error
        for call in (
            server.search(),
            server.client._stub.UpsertDocument(pb.UpsertDocumentRequest()),
            server.client._stub.DeleteDocument(pb.DeleteDocumentRequest()),
        ):
            with pytest.raises(Exception, match=r".+"):
                await call
        for name in ("searches_total", "upserts_total", "deletes_total"):
            await server.until(name, outcome)


async def test_only_documents_that_changed_count_as_ingested() -> None:
    async with serving() as server:
        await server.client.upsert_document(DOCUMENT)
        server.service.changed = False
        await server.client.upsert_document(DOCUMENT)
        await server.client.delete_document("c", "a")
        await server.until("upserts_total", "changed")
        await server.until("upserts_total", "unchanged")
        await server.until("deletes_total", "deleted")
        assert server.value("ingested_chunks_total") == 3
        assert server.value("ingested_size_bytes_total") == len(DOCUMENT.text)
        assert server.value("upsert_duration_seconds_count") == 1


async def searched(server: Server) -> list[pb.SearchStage]:
    return [stage async for stage in server.client.search("c", "q", 1)]


async def test_a_key_leaves_searches_to_another_one() -> None:
    async with serving(max_searches=16) as server:
        server.service.released.clear()
        with asking("red"):
            sent = [asyncio.create_task(searched(server)) for _ in range(20)]
        await until(lambda: server.service.num_waiting + sum(one.done() for one in sent) == 20)
        assert server.service.num_waiting == 14
        with asking("blue"):
            other = asyncio.create_task(searched(server))
        await until(lambda: server.service.num_waiting == 15)
        server.service.released.set()
        await other
        results = await asyncio.gather(*sent, return_exceptions=True)
        assert sum(isinstance(one, Overloaded) for one in results) == 6


async def test_a_key_takes_no_more_upsert_bytes_than_it_leaves_free() -> None:
    async with serving(max_upsert_bytes=10 * UPSERT_BYTES) as server:
        server.service.released.clear()
        with asking("red"):
            sent = [asyncio.create_task(server.client.upsert_document(DOCUMENT)) for _ in range(8)]
        await until(lambda: server.service.num_waiting + sum(one.done() for one in sent) == 8)
        assert server.service.num_waiting == 5
        with asking("blue"):
            other = asyncio.create_task(server.client.upsert_document(DOCUMENT))
        await until(lambda: server.service.num_waiting == 6)
        server.service.released.set()
        await other
        await asyncio.gather(*sent, return_exceptions=True)
