"""Collections with quotas, filters and an end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from ragcache_core.errors import InvalidInput, NotFound, TooLarge, Unavailable
from ragcache_retriever.embedding.embedder import Vectors
from ragcache_retriever.knowledge_base import collections
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.knowledge_base.remake import Remake
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.status import from_rpc_error
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.retriever import (
    WordEmbedder,
    make_knowledge_base,
    serving,
    stages_of,
    status_of,
    tokenizer_of,
)


@pytest.fixture
def knowledge_base(tmp_path: Path, tiny_model: Path) -> KnowledgeBase:
    return make_knowledge_base(tmp_path, tokenizer_of(tiny_model))


@pytest_asyncio.fixture
async def client(knowledge_base: KnowledgeBase) -> AsyncIterator[RetrieverClient]:
    async with serving(knowledge_base) as client:
        yield client


async def put(
    client: RetrieverClient,
    document_id: str,
    text: str,
    collection: str = "default",
    **metadata: str,
) -> pb.UpsertDocumentReply:
    return await client.upsert_document(
        pb.Document(collection=collection, id=document_id, text=text, metadata=json.dumps(metadata))
    )


async def delete_collection(client: RetrieverClient, name: str) -> pb.DeleteCollectionReply:
    try:
        request = pb.DeleteCollectionRequest(name=name)
        return await client._stub.DeleteCollection(request, timeout=60)
    except grpc.RpcError as error:
        raise from_rpc_error("retriever", error) from error


async def found(client: RetrieverClient, **fields: object) -> list[str]:
    """Return the documents of the hits of the final stage."""
    defaults: dict[str, object] = {"collection": "default", "query": "apple", "top_k": 10}
    stages = await stages_of(client, pb.SearchRequest(**(defaults | fields)))  # type: ignore[arg-type]
    assert stages[-1].final
    assert stages[-1].final_probability == 1
    return [hit.chunk.document_id for hit in stages[-1].hits]


def field(name: str, *values: str) -> pb.Filter:
    return pb.Filter(field=pb.FieldFilter(name=name, one_of=pb.TextList(values=values)))


async def test_a_deleted_collection_is_gone_with_its_documents(
    client: RetrieverClient, knowledge_base: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collections, "REMOVED_AT_ONCE", 2)
    await client.put_collection(pb.Collection(name="team"))
    for i in range(5):
        await put(client, f"d{i}", f"Apple number {i}.", "team")
    await put(client, "kept", "Apple.")
    reply = await delete_collection(client, "team")
    assert reply.documents == 5
    assert [one.document_id for one in reply.deletes] == ["d0", "d1"]
    for call in (
        client.get_collection("team"),
        client.get_document("team", "d4"),
        put(client, "d9", "text", "team"),
        delete_collection(client, "team"),
    ):
        with pytest.raises(NotFound):
            await call
    await knowledge_base.wait_until_idle()
    assert [one.name for one in await client.list_collections()] == ["default"]
    # Gateways learn of each document, and get all deletes.
    removals = (await client.list_removals(0)).removals
    assert {(one.collection, one.document_id) for one in removals} == {
        ("team", f"d{i}") for i in range(5)
    }
    claimed = (await client.claim_deletes(100)).deletes
    assert {one.document_id for one in claimed} == {f"d{i}" for i in range(5)}
    again = await client.put_collection(pb.Collection(name="team"))
    assert again.documents == 0
    assert await found(client) == ["kept"]


class HeldEmbedder(WordEmbedder):
    """Embeds nothing while ``may_embed`` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_embed = asyncio.Event()
        self.may_embed.set()
        self.is_held = asyncio.Event()

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> Vectors:
        if not self.may_embed.is_set():
            self.is_held.set()
            await self.may_embed.wait()
        return await super().embed(texts, urgent=urgent)


async def test_a_collection_that_is_prepared_again_can_be_deleted(
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(collections, "REMOVED_AT_ONCE", 1)
    embedder = HeldEmbedder()
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    async with serving(knowledge_base) as client:
        await client.put_collection(pb.Collection(name="team"))
        for i in range(5):
            await put(client, f"d{i}", f"Apple number {i}. " * 20, "team")
        embedder.may_embed.clear()
        chunking = pb.Chunking(size_tokens=24, overlap_tokens=0)
        await client.put_collection(pb.Collection(name="team", chunking=chunking))
        await embedder.is_held.wait()
        # The chunks of these documents arrive when searches cannot use their words any more.
        await client.delete_collection("team")
        embedder.may_embed.set()
        await knowledge_base.wait_until_idle()
        assert [one.name for one in await client.list_collections()] == ["default"]
    assert "remake: interrupted" not in caplog.text


async def test_the_default_collection_comes_back_empty(
    client: RetrieverClient, knowledge_base: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(client, "d", "Apple.")
    with monkeypatch.context() as removal:
        removal.setattr(Remake, "start", lambda _: None)  # removes nothing meanwhile
        await delete_collection(client, "default")
        with pytest.raises(Unavailable, match="being deleted"):
            await client.put_collection(pb.Collection(name="default"))
    await knowledge_base.load()
    await knowledge_base.wait_until_idle()
    assert (await client.get_collection("default")).documents == 0
    await put(client, "e", "Apple.")
    assert await found(client) == ["e"]


async def test_the_lexical_weight_counts_from_the_next_search_on(
    tmp_path: Path, tiny_model: Path
) -> None:
    embedder = WordEmbedder()
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    async with serving(knowledge_base) as client:
        await put(client, "words", "An apple, and much about pears, plums and cherries.")
        await put(client, "other", "Nothing but bread.")
        embedder.embedded.clear()

        async def scores(weight: float | None = None) -> dict[str, float]:
            collection = pb.Collection(name="default", lexical_weight=weight)
            info = await client.put_collection(collection, keep_unset=True)
            assert not info.HasField("remake")
            request = pb.SearchRequest(collection="default", query="apple bread", top_k=10)
            *_, final = await stages_of(client, request)
            assert final.final
            for hit in final.hits:
                assert hit.legs.HasField("dense") == (weight != 1)
                assert hit.legs.HasField("lexical") == (weight != 0)
            return {hit.chunk.document_id: hit.score for hit in final.hits}

        default, dense, lexical = await scores(), await scores(0), await scores(1)
        assert default.keys() == dense.keys() == lexical.keys() == {"words", "other"}
        for name, score in default.items():
            assert score == pytest.approx(0.6 * dense[name] + 0.4 * lexical[name])
        assert await scores(0.4) == default
        assert set(embedder.embedded) == {"apple bread"}, "no document is embedded again"


async def test_a_quota_names_the_field_and_the_fix(client: RetrieverClient) -> None:
    settings = pb.Collection(name="small", max_documents=1, max_text_bytes=100)
    created = await client.put_collection(settings)
    assert (created.max_documents, created.max_text_bytes) == (1, 100)
    await put(client, "a", "Apple.", "small")
    with pytest.raises(TooLarge, match="raise max_documents") as caught:
        await put(client, "b", "Apple.", "small")
    assert caught.value.field == "document"
    with pytest.raises(TooLarge, match="raise max_text_bytes") as caught:
        await put(client, "a", "Apple. " * 100, "small")
    assert caught.value.field == "document.text"
    info = await client.get_collection("small")
    assert (info.documents, info.text_bytes) == (1, len("Apple."))
    await client.delete_document("small", "a")
    await put(client, "b", "Apple.", "small")


async def test_the_number_of_collections_is_bounded(
    client: RetrieverClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collections, "MAX_COLLECTIONS", 2)
    await client.put_collection(pb.Collection(name="second"))
    with pytest.raises(TooLarge, match="2 collections"):
        await client.put_collection(pb.Collection(name="third"))


async def test_a_filter_applies_before_the_search(client: RetrieverClient) -> None:
    for i in range(12):
        await put(
            client,
            f"d{i:02}",
            "Apple " * (12 - i) + f"one{i} two{i}",
            team="red" if i % 3 else "blue",
        )
    assert set(await found(client, filter=field("team", "blue"), top_k=100)) == {
        "d00",
        "d03",
        "d06",
        "d09",
    }
    either = pb.Filter(any=pb.Filters(filters=[field("id", "d01"), field("team", "blue")]))
    assert len(set(await found(client, filter=either, top_k=100))) == 5
    no_blue = pb.Filter(none=field("team", "blue"))
    words = await found(client, filter=no_blue, mode=pb.SEARCH_MODE_LEXICAL, top_k=100)
    assert len(set(words)) == 8
    assert await found(client, filter=field("team", "green")) == []
    with pytest.raises(InvalidInput, match="filter"):
        await found(client, filter=pb.Filter())


async def test_hits_carry_scores_of_legs_and_token_ids(
    client: RetrieverClient, tiny_model: Path
) -> None:
    reply = await put(client, "d", "Apple pie.", team="red")
    request = pb.SearchRequest(collection="default", query="apples", top_k=1)
    request.mode = pb.SEARCH_MODE_LEXICAL
    [stage] = await stages_of(client, request)
    [hit] = stage.hits
    assert (hit.legs.lexical_rank, hit.legs.HasField("dense")) == (1, False)
    assert hit.score == pytest.approx(hit.legs.lexical)
    tokenizer = tokenizer_of(tiny_model)
    assert hit.chunk.token_ids == tokenizer.token_ids("Apple pie.")
    assert hit.chunk.tokenizer_identity == tokenizer.identity
    assert hit.chunk.content_hash == reply.document.content_hash
    assert hit.chunk.updated_unix_ms == reply.document.updated_unix_ms
    request.mode = pb.SEARCH_MODE_DENSE
    stages = await stages_of(client, request)
    assert stages[-1].hits[0].legs.dense_rank == 1
    assert not await found(client, min_score=2.0, mode=pb.SEARCH_MODE_DENSE)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"mode": 9}, "mode"),
        ({"diversity": 1.5}, "diversity"),
        ({"recall": 0.0}, "recall"),
        ({"recall": 1.5}, "recall"),
        ({"min_score": float("nan")}, "min_score"),
    ],
)
async def test_options_out_of_range_are_refused(
    client: RetrieverClient, fields: dict[str, object], name: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        await found(client, **fields)
    assert caught.value.field == name


async def test_the_kind_of_an_index_can_be_changed(client: RetrieverClient) -> None:
    for i in range(5):
        await put(client, f"d{i}", f"Apple number {i}.")
    changed = await client.put_collection(pb.Collection(name="default", index=pb.INDEX_KIND_IVF))
    assert changed.index == pb.INDEX_KIND_IVF
    assert len(await found(client)) == 5
    status = await status_of(client)
    [index] = status.indexes
    assert (index.collection, index.vectors, index.lexical_only) == ("default", 5, False)
    assert status.backend == "embedded"
    assert min(status.free_disk_bytes, status.memory_bytes, index.memory_bytes) > 0
    with pytest.raises(InvalidInput, match="IndexKind"):
        await client.put_collection(pb.Collection(name="default", index=9))  # type: ignore[arg-type]
