"""The contract of the whole knowledge base, on all backends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from ragcache_core.errors import NotFound
from ragcache_core.retrieval.filters import In, Not
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.documents.collection import CollectionSettings
from ragcache_retriever.documents.tokenizer import ServingTokenizer
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.ranking.search import SearchMode
from ragcache_retriever.search.milvus import MilvusIndexes
from ragcache_retriever.store.postgres.document_store import open_postgres
from ragcache_retriever.store.postgres.vector_index import PgvectorIndexes
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.integration.retriever.knowledge_base_contract import (
    KnowledgeBaseContract,
    KnowledgeBaseHarness,
    Server,
    ServerContract,
    SharedContract,
    a_document,
    found,
    until_available,
    until_done,
)
from tests.kit.milvus_server import MilvusServer
from tests.kit.postgres_server import PostgresServer
from tests.kit.retriever import make_knowledge_base, tokenizer_of


@dataclass
class EmbeddedHarness:
    """SQLite and index files of one folder."""

    folder: Path
    tokenizer: ServingTokenizer
    server: Server | None = None

    async def opened(self) -> KnowledgeBase:
        knowledge_base = make_knowledge_base(self.folder, self.tokenizer)
        await knowledge_base.load()
        return knowledge_base


@dataclass
class PostgresHarness:
    """A schema of a server."""

    folder: Path
    tokenizer: ServingTokenizer
    server: PostgresServer
    url: str

    async def opened(self) -> KnowledgeBase:
        store = open_postgres(self.url)
        knowledge_base = make_knowledge_base(
            self.folder, self.tokenizer, store=store, indexes=PgvectorIndexes(store.database)
        )
        await knowledge_base.load()
        return knowledge_base


@dataclass
class MilvusHarness:
    """SQLite of one folder, and a server with its vectors."""

    folder: Path
    tokenizer: ServingTokenizer
    server: MilvusServer

    async def opened(self) -> KnowledgeBase:
        knowledge_base = make_knowledge_base(
            self.folder, self.tokenizer, indexes=MilvusIndexes(self.server.url, "0123")
        )
        # The process, too, repeats it until the server answers.
        await until_done(knowledge_base.load)
        return knowledge_base


@pytest.fixture
def embedded(tmp_path: Path, tiny_model: Path) -> EmbeddedHarness:
    return EmbeddedHarness(tmp_path, tokenizer_of(tiny_model))


@pytest.fixture
def in_postgres(tmp_path: Path, tiny_model: Path, postgres: PostgresServer) -> PostgresHarness:
    return PostgresHarness(tmp_path, tokenizer_of(tiny_model), postgres, postgres.new_schema())


@pytest.fixture
def in_milvus(tmp_path: Path, tiny_model: Path) -> Iterator[MilvusHarness]:
    server = MilvusServer(tmp_path / "milvus")
    yield MilvusHarness(tmp_path, tokenizer_of(tiny_model), server)
    server.stop()


def harness_of(request: pytest.FixtureRequest) -> KnowledgeBaseHarness:
    harness: KnowledgeBaseHarness = request.getfixturevalue(request.param)
    return harness


class TestDocuments(KnowledgeBaseContract):
    @pytest.fixture(params=["embedded", "in_postgres", "in_milvus"])
    def harness(self, request: pytest.FixtureRequest) -> KnowledgeBaseHarness:
        return harness_of(request)

    @pytest_asyncio.fixture
    async def knowledge_base(self, harness: KnowledgeBaseHarness) -> AsyncIterator[KnowledgeBase]:
        knowledge_base = await harness.opened()
        yield knowledge_base
        await knowledge_base.close()


class TestServers(ServerContract):
    @pytest.fixture(params=["in_postgres", "in_milvus"])
    def harness(self, request: pytest.FixtureRequest) -> KnowledgeBaseHarness:
        return harness_of(request)


class TestShared(SharedContract):
    @pytest.fixture(params=["in_postgres"])
    def harness(self, request: pytest.FixtureRequest) -> KnowledgeBaseHarness:
        return harness_of(request)


async def test_an_index_that_is_behind_finds_no_removed_row(in_milvus: MilvusHarness) -> None:
    knowledge_base = await in_milvus.opened()
    for name in ("a", "b", "c"):
        await knowledge_base.ingestion.upsert("default", a_document(name, f"apple {name}"))
    await knowledge_base._follower.close()  # so that it stays behind
    in_milvus.server.stop()
    await knowledge_base.ingestion.delete("default", "a")
    await knowledge_base.ingestion.upsert("default", a_document("d", "apple d"))
    in_milvus.server.start()

    async def has_answered() -> bool:
        [index] = await knowledge_base.collections.index_statuses()
        assert (index.missed_vectors, index.vectors) == (2, 3)
        return True

    await until_available(has_answered)
    generation = knowledge_base.collections.serving("default").row
    with knowledge_base._indexes.using(generation) as index:
        assert len(index.rows()) == 3  # the removed one, too
    num_published = knowledge_base._indexes.num_published
    hits = await found(knowledge_base, "apple", SearchMode.DENSE, top_k=2)
    assert sorted(hits) == ["apple b", "apple c"]
    filtered = await found(knowledge_base, "apple", SearchMode.DENSE, Not(In("id", ("b",))))
    assert filtered == ["apple c"]
    assert knowledge_base._indexes.num_published == num_published
    knowledge_base._indexes.catch_up(generation)
    assert sorted(await found(knowledge_base, "apple", SearchMode.DENSE)) == [
        "apple b",
        "apple c",
        "apple d",
    ]
    await knowledge_base.close()


async def test_collections_that_change_while_milvus_is_away_are_served_afterwards(
    in_milvus: MilvusHarness,
) -> None:
    knowledge_base = await in_milvus.opened()
    await knowledge_base.put_collection("old", CollectionSettings())
    await knowledge_base.put_collection("kept", CollectionSettings(index=IndexKind.FLAT))
    await knowledge_base.ingestion.upsert("kept", a_document("d", "apple kept"))
    in_milvus.server.stop()
    try:
        await knowledge_base.put_collection("new", CollectionSettings())
        await knowledge_base.put_collection("kept", CollectionSettings(index=IndexKind.HNSW))
        await knowledge_base.delete_collection("old")
        await knowledge_base.ingestion.upsert("new", a_document("d", "apple new"))
        with pytest.raises(NotFound):
            await knowledge_base.collections.info("old")
    finally:
        in_milvus.server.start()

    async def is_served() -> bool:
        infos = {one.collection: one for one in await knowledge_base.collections.index_statuses()}
        assert infos.keys() == {"default", "kept", "new"}
        return infos["kept"].kind == pb.INDEX_KIND_HNSW and infos["new"].vectors == 1

    await until_available(is_served)
    for name in ("kept", "new"):
        hits = await found(knowledge_base, "apple", SearchMode.DENSE, collection=name)
        assert hits == [f"apple {name}"]
    await knowledge_base.close()
