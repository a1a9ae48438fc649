"""The retriever as its clients see it: real gRPC, SQLite and faiss; a small embedder."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from ragcache_core.errors import InvalidInput, NotFound, TooLarge
from ragcache_retriever import service
from ragcache_retriever.documents.splitter import SplitLimit
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.store import outbox
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.retriever import digest_of, make_knowledge_base, serving, tokenizer_of


def document(document_id: str, text: str, **fields: object) -> pb.Document:
    defaults = {"collection": "default", "content_type": pb.CONTENT_TYPE_MARKDOWN}
    return pb.Document(id=document_id, text=text, **(defaults | fields))  # type: ignore[arg-type]


def service_page(name: str, region: str) -> str:
    paragraphs = [
        f"The {name} service runs in region {region}. It is owned by the team that answers alerts.",
        "It keeps its records in a database. The database is copied every night. "
        "Copies are kept for thirty days and then removed.",
        "Alerts go to the pager of whoever is on duty. Duty changes every Monday at noon.",
    ]
    return f"# {name}\n\n" + "\n\n".join(paragraphs) + "\n"


@pytest.fixture
def knowledge_base(tmp_path: Path, tiny_model: Path) -> KnowledgeBase:
    return make_knowledge_base(tmp_path, tokenizer_of(tiny_model))


@pytest_asyncio.fixture
async def client(knowledge_base: KnowledgeBase) -> AsyncIterator[RetrieverClient]:
    async with serving(knowledge_base) as client:
        yield client


async def search(
    client: RetrieverClient, query: str, top_k: int = 3, collection: str = "default"
) -> list[pb.SearchStage]:
    return [stage async for stage in client.search(collection, query, top_k)]


def ids(stage: pb.SearchStage) -> list[str]:
    return [hit.chunk.id for hit in stage.hits]


def removed_digests(reply: pb.UpsertDocumentReply | pb.DeleteDocumentReply) -> list[bytes]:
    return [digest for delete in reply.deletes for digest in delete.token_digests]


async def test_a_document_is_found_as_soon_as_it_is_acknowledged(client: RetrieverClient) -> None:
    reply = await client.upsert_document(document("billing", service_page("billing", "north")))
    assert reply.changed
    assert reply.document.title == "billing"
    assert reply.document.num_chunks > 1
    assert reply.document.text == ""
    stages = await search(client, "billing service region north")
    assert stages
    assert [stage.final for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert [s.progress for s in stages] == sorted(s.progress for s in stages)
    best = stages[-1].hits[0]
    assert best.chunk.id == "billing#0"
    assert best.chunk.text.startswith("# billing\n\nThe billing service runs in region north.")
    assert list(best.chunk.heading_path) == ["billing"]
    assert [chunk.ordinal for chunk in best.after] == [1]
    assert not best.before


async def test_an_unchanged_document_stays_as_it_is(
    client: RetrieverClient, tiny_model: Path
) -> None:
    first = await client.upsert_document(document("d", service_page("d", "north")))
    again = await client.upsert_document(document("d", service_page("d", "north")))
    assert not again.changed
    assert again.document == first.document
    assert not again.deletes
    retitled = await client.upsert_document(
        document("d", service_page("d", "north"), title="Other", metadata='{"k": "v"}')
    )
    assert retitled.changed
    assert retitled.document.content_hash != first.document.content_hash
    # Its chunks begin with the title.
    old = {digest_of(tokenizer_of(tiny_model), text) for text in first.chunks}
    assert set(removed_digests(retitled)) == old


async def test_titles_have_no_control_characters(client: RetrieverClient) -> None:
    title, heading = "\x1b]0;owned\x07  Hand\x9bbook", "# \x1b[2JBilling\n\nIt runs."
    given = await client.upsert_document(document("a", "text", title=title))
    assert given.document.title == "]0;owned Handbook"
    found = await client.upsert_document(document("b", heading))
    assert found.document.title == "[2JBilling"
    only = await client.upsert_document(document("c", "text", title="\x1b\x7f"))
    assert only.document.title == "c"


async def test_a_changed_document_is_found_by_its_new_text(
    client: RetrieverClient, tiny_model: Path
) -> None:
    chunks_of_a = (await client.upsert_document(document("a", service_page("a", "north")))).chunks
    await client.upsert_document(document("b", service_page("b", "north")))
    old = (await client.get_document("default", "a")).text
    reply = await client.upsert_document(document("a", old.replace("north", "zanzibar")))
    [changed] = [text for text in chunks_of_a if "region north" in text]
    assert removed_digests(reply) == [digest_of(tokenizer_of(tiny_model), changed)]
    final = (await search(client, "region zanzibar", 1))[-1]
    assert ids(final) == ["a#0"]
    assert "zanzibar" in final.hits[0].chunk.text


async def test_a_deleted_document_is_gone(client: RetrieverClient, tiny_model: Path) -> None:
    # The pages have one title and no headings. They differ in their first chunk only, so the other
    # page still has the rest.
    fields = {"title": "Services", "content_type": pb.CONTENT_TYPE_TEXT}
    page = document("a", service_page("a", "north"), **fields)
    first = (await client.upsert_document(page)).chunks[0]
    await client.upsert_document(document("b", service_page("b", "south"), **fields))
    reply = await client.delete_document("default", "a")
    assert removed_digests(reply) == [digest_of(tokenizer_of(tiny_model), first)]
    final = (await search(client, "a north", 100))[-1]
    assert {hit.chunk.document_id for hit in final.hits} == {"b"}
    with pytest.raises(NotFound) as caught:
        await client.get_document("default", "a")
    assert (caught.value.kind, caught.value.name) == ("document", "a")


async def test_a_repeated_change_returns_its_pending_deletes(client: RetrieverClient) -> None:
    await client.upsert_document(document("a", service_page("a", "north")))
    changed = document("a", service_page("a", "south"))
    [update] = (await client.upsert_document(changed)).deletes
    again = await client.upsert_document(changed)
    assert not again.changed
    assert list(again.deletes) == [update]
    first = await client.delete_document("default", "a")
    assert first.deletes[0] == update  # no shard has acknowledged it
    assert len(first.deletes) == 2
    assert (await client.delete_document("default", "a")).deletes == first.deletes
    await client.acknowledge_deletes([one.id for one in first.deletes], [])
    assert not (await client.delete_document("default", "a")).deletes
    with pytest.raises(NotFound):
        await client.delete_document("default", "never")


async def test_deletes_of_a_new_chunking_can_be_claimed(
    client: RetrieverClient, knowledge_base: KnowledgeBase, tiny_model: Path
) -> None:
    reply = await client.upsert_document(document("a", service_page("a", "north")))
    before = await client.list_removals(0)
    assert not before.removals
    chunking = pb.Chunking(size_tokens=32, overlap_tokens=0)
    await client.put_collection(pb.Collection(name="default", chunking=chunking))
    await knowledge_base.wait_until_idle()
    [removal] = (await client.list_removals(before.last_sequence)).removals
    assert (removal.collection, removal.document_id) == ("default", "a")
    claim = await client.claim_deletes(10)
    [delete] = claim.deletes
    assert (claim.unacknowledged, delete.names_document) == (1, True)
    tokenizer = tokenizer_of(tiny_model)
    assert set(delete.token_digests) <= {digest_of(tokenizer, text) for text in reply.chunks}
    assert not (await client.claim_deletes(10)).deletes
    with pytest.raises(InvalidInput, match="limit"):
        await client.claim_deletes(0)


async def test_a_reply_holds_no_more_chunks_than_fit_into_a_message(
    client: RetrieverClient, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await client.upsert_document(document("a", service_page("a", "north")))
    assert reply.document.num_chunks == len(reply.chunks) > 1
    first = reply.chunks[0]
    monkeypatch.setattr(service, "MAX_CHUNKS_BYTES", len(first) + 2)
    changed = document("a", service_page("a", "north"), metadata=json.dumps({"k": "v"}))
    again = await client.upsert_document(changed)
    assert list(again.chunks) == [first]
    monkeypatch.setattr(outbox, "DELETE_CHUNKS", 1)
    monkeypatch.setattr(service, "MAX_CHUNKS_BYTES", 60)
    deleted = await client.delete_document("default", "a")
    assert removed_digests(deleted) == [digest_of(tokenizer_of(tiny_model), first)]


async def test_a_document_that_takes_too_long_to_split_is_refused_and_others_are_served(
    tmp_path: Path, tiny_model: Path
) -> None:
    tokenizer, limit = tokenizer_of(tiny_model), SplitLimit(base_s=1.0, s_per_million_chars=0.0)
    async with serving(make_knowledge_base(tmp_path, tokenizer, split_limit=limit)) as client:
        endless = document("tables/all", "|\n" * (1 << 20), title="Tables")
        upsert = asyncio.create_task(client.upsert_document(endless))
        await client.upsert_document(document("a", service_page("a", "north")))
        assert {hit.chunk.document_id for hit in (await search(client, "region"))[-1].hits} == {"a"}
        with pytest.raises(InvalidInput, match="'tables/all' takes more than 1 s") as caught:
            await upsert
        assert caught.value.field == "document.text"
        assert (await client.upsert_document(document("b", service_page("b", "south")))).changed
        assert (await client.get_collection("default")).documents == 2


async def test_documents_are_read_and_listed(client: RetrieverClient) -> None:
    text = service_page("x", "north")
    for i in range(5):
        await client.upsert_document(document(f"d{i}", text, metadata=json.dumps({"n": i})))
    stored = await client.get_document("default", "d3")
    assert (stored.text, json.loads(stored.metadata)) == (text, {"n": 3})
    assert stored.updated_unix_ms == 1_700_000_000_000
    seen = []
    token = ""
    while True:
        page = await client.list_documents("default", page_size=2, page_token=token)
        seen += [(d.id, d.text) for d in page.documents]
        if not (token := page.next_page_token):
            break
    assert seen == [(f"d{i}", "") for i in range(5)]
    info = await client.get_collection("default")
    assert info.documents == 5
    assert info.chunks == 5 * stored.num_chunks


async def test_titles(client: RetrieverClient) -> None:
    async def title(**fields: object) -> str:
        reply = await client.upsert_document(document("the-id", "# Heading\n\ntext", **fields))
        return reply.document.title

    assert await title(title="  Own\ntitle ") == "Own title"
    assert await title() == "Heading"
    assert await title(content_type=pb.CONTENT_TYPE_TEXT) == "the-id"


async def test_settings_of_collections(client: RetrieverClient) -> None:
    created = await client.put_collection(pb.Collection(name="team"))
    assert (created.chunking.size_tokens, created.chunking.overlap_tokens) == (64, 16)
    assert created.window == 1
    own = pb.Collection(name="team", chunking=pb.Chunking(size_tokens=32), window=0)
    assert (await client.put_collection(own)).window == 0
    found = await client.list_collections()
    assert [c.name for c in found] == ["default", "team"]
    assert found[1].chunking == pb.Chunking(size_tokens=32, overlap_tokens=0)
    assert (await client.put_collection(pb.Collection(name="team"))).window == 1
    assert created.lexical_weight == 0.4
    own = pb.Collection(name="team", lexical_weight=0.0)
    assert (await client.put_collection(own)).lexical_weight == 0.0
    assert (await client.put_collection(pb.Collection(name="team"))).lexical_weight == 0.4


async def test_a_change_of_some_settings_keeps_the_others(client: RetrieverClient) -> None:
    some = pb.Collection(name="team", index=pb.INDEX_KIND_FLAT, max_documents=7, lexical_weight=0.7)
    await client.put_collection(some, keep_unset=True)
    await client.put_collection(pb.Collection(name="team", window=0), keep_unset=True)
    changed = await client.put_collection(
        pb.Collection(name="team", max_documents=0, max_text_bytes=9), keep_unset=True
    )
    assert (changed.window, changed.index) == (0, pb.INDEX_KIND_FLAT)
    assert changed.lexical_weight == 0.7
    assert (changed.max_documents, changed.max_text_bytes) == (0, 9)
    replaced = await client.put_collection(pb.Collection(name="team"))
    assert (replaced.window, replaced.index) == (1, pb.INDEX_KIND_AUTO)
    assert (replaced.max_text_bytes, replaced.lexical_weight) == (0, 0.4)


async def test_changed_chunking_splits_documents_again(
    client: RetrieverClient, knowledge_base: KnowledgeBase, tiny_model: Path
) -> None:
    count = tokenizer_of(tiny_model).count
    await client.put_collection(pb.Collection(name="team"))
    for name in ("a", "b"):
        page = document(name, service_page(name, "north"), collection="team")
        await client.upsert_document(page)
    before = await client.get_collection("team")
    after = await client.put_collection(
        pb.Collection(name="team", chunking=pb.Chunking(size_tokens=24, overlap_tokens=0), window=0)
    )
    assert after.chunking.size_tokens == 24
    assert (after.remake.documents, after.remake.reason) == (2, "chunking")
    await knowledge_base.wait_until_idle()
    after = await client.get_collection("team")
    assert not after.HasField("remake")
    assert after.documents == before.documents == 2
    assert after.chunks > before.chunks
    final = (await search(client, "region", 100, "team"))[-1]
    assert sum(1 + len(hit.duplicates) for hit in final.hits) == after.chunks
    assert max(count(hit.chunk.text) for hit in final.hits) <= 24
    assert not any(hit.before or hit.after for hit in final.hits)


async def test_collections_do_not_see_each_other(client: RetrieverClient) -> None:
    await client.put_collection(pb.Collection(name="other"))
    await client.upsert_document(document("d", "# A\n\nin default"))
    await client.upsert_document(document("d", "# A\n\nin other", collection="other"))
    await client.delete_document("default", "d")
    assert ids((await search(client, "in", 5))[-1]) == []
    assert ids((await search(client, "in", 5, "other"))[-1]) == ["d#0"]


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"collection": "Team"}, InvalidInput, "document.collection"),
        ({"id": ""}, InvalidInput, "document.id"),
        ({"id": "x" * 513}, InvalidInput, "document.id"),
        ({"id": "a\nb"}, InvalidInput, "document.id"),
        ({"text": " \n"}, InvalidInput, "document.text"),
        ({"text": "a\0b"}, InvalidInput, "document.text"),
        ({"text": "x" * (8 * 2**20 + 1)}, TooLarge, "document.text"),
        ({"title": "x" * 1025}, InvalidInput, "document.title"),
        ({"title": "a\0"}, InvalidInput, "document.title"),
        ({"content_type": 9}, InvalidInput, "document.content_type"),
        ({"metadata": json.dumps({"k": "x" * 20_000})}, TooLarge, "document.metadata"),
        ({"metadata": json.dumps({"k" * 257: "x"})}, TooLarge, "document.metadata"),
        ({"metadata": json.dumps({"k": ["\0"]})}, InvalidInput, "document.metadata"),
        ({"metadata": '{"k": "\\ud800"}'}, InvalidInput, "document.metadata"),
        ({"metadata": '{"k": {"a": 1}}'}, InvalidInput, "document.metadata.k"),
        ({"metadata": '{"k": NaN}'}, InvalidInput, "document.metadata.k"),
        ({"metadata": "["}, InvalidInput, "document.metadata"),
        ({"metadata": "[]"}, InvalidInput, "document.metadata"),
    ],
)
async def test_documents_that_are_refused(
    client: RetrieverClient, fields: dict[str, object], error: type[InvalidInput], field: str
) -> None:
    values: dict[str, object] = {"collection": "default", "id": "d", "text": "text"}
    with pytest.raises(error) as caught:
        await client.upsert_document(pb.Document(**(values | fields)))  # type: ignore[arg-type]
    assert type(caught.value) is error
    assert caught.value.field == field
    assert caught.value.fix
    assert (await client.get_collection("default")).documents == 0


@pytest.mark.parametrize(
    ("query", "top_k", "error", "field"),
    [
        ("", 1, InvalidInput, "query"),
        ("  \n", 1, InvalidInput, "query"),
        ("a\0", 1, InvalidInput, "query"),
        ("x" * 8193, 1, TooLarge, "query"),
        ("x", 0, InvalidInput, "top_k"),
        ("x", 1001, InvalidInput, "top_k"),
        ("x", 10_000, InvalidInput, "top_k"),
    ],
)
async def test_searches_that_are_refused(
    client: RetrieverClient, query: str, top_k: int, error: type[InvalidInput], field: str
) -> None:
    with pytest.raises(error) as caught:
        await search(client, query, top_k)
    assert type(caught.value) is error
    assert caught.value.field == field


async def test_an_unknown_collection_is_not_found(client: RetrieverClient) -> None:
    for call in (
        search(client, "x", 1, "nowhere"),
        client.upsert_document(document("d", "text", collection="nowhere")),
        client.delete_document("nowhere", "d"),
        client.get_document("nowhere", "d"),
        client.list_documents("nowhere"),
        client.get_collection("nowhere"),
    ):
        with pytest.raises(NotFound, match="PutCollection") as caught:
            await call
        assert (caught.value.kind, caught.value.name) == ("collection", "nowhere")


@pytest.mark.parametrize(
    ("collection", "field"),
    [
        (pb.Collection(name=""), "collection.name"),
        (pb.Collection(name="a", window=9), "collection.window"),
        (pb.Collection(name="a", lexical_weight=1.01), "collection.lexical_weight"),
        (pb.Collection(name="a", lexical_weight=-0.01), "collection.lexical_weight"),
        (pb.Collection(name="a", lexical_weight=math.nan), "collection.lexical_weight"),
        (
            pb.Collection(name="a", chunking=pb.Chunking(size_tokens=8)),
            "collection.chunking.size_tokens",
        ),
        (
            pb.Collection(name="a", chunking=pb.Chunking(size_tokens=64, overlap_tokens=32)),
            "collection.chunking.overlap_tokens",
        ),
    ],
)
async def test_collections_that_are_refused(
    client: RetrieverClient, collection: pb.Collection, field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        await client.put_collection(collection)
    assert caught.value.field == field
    assert len(await client.list_collections()) == 1


@pytest.mark.parametrize(("size", "token"), [(1001, ""), (1, "!"), (1, "/w==")])
async def test_pages_that_are_refused(client: RetrieverClient, size: int, token: str) -> None:
    with pytest.raises(InvalidInput):
        await client.list_documents("default", size, token)


async def test_hits_that_outgrow_a_message_are_refused(client: RetrieverClient) -> None:
    long = pb.Chunking(size_tokens=4096, overlap_tokens=0)
    await client.put_collection(pb.Collection(name="long", chunking=long, window=8))
    text = "\n\n".join(f"service{i} runs in region{i} north " * 30 for i in range(1200))
    await client.upsert_document(document("d", text, collection="long"))
    assert (await search(client, "north", 5, "long"))[-1].final
    with pytest.raises(TooLarge) as caught:
        await search(client, "north", 1000, "long")
    assert caught.value.field == "top_k"


async def test_searches_during_writes_see_whole_documents(client: RetrieverClient) -> None:
    """A stage holds chunks of one version only, and the final stage has all of them."""
    done = asyncio.Event()

    async def write() -> None:
        try:
            for version in range(20):
                await client.upsert_document(document("d", service_page("d", f"north{version}")))
        finally:
            done.set()

    async def read() -> int:
        count = 0
        while not done.is_set():
            for stage in await search(client, "region", 100):
                versions = set(re.findall(r"north\d+", str(stage.hits)))
                assert len(versions) == 1
                assert not stage.final or len(stage.hits) == num_chunks
            count += 1
        return count

    reply = await client.upsert_document(document("d", service_page("d", "north")))
    await client.upsert_document(document("d", service_page("d", "north0")))
    num_chunks = reply.document.num_chunks
    *counts, _ = await asyncio.gather(read(), read(), write())
    assert min(counts) > 0


async def test_concurrent_writes_of_one_document_leave_one_version(
    client: RetrieverClient,
) -> None:
    pages = [document("d", service_page("d", f"north{i}")) for i in range(8)]
    await asyncio.gather(*map(client.upsert_document, pages))
    stored = await client.get_document("default", "d")
    final = (await search(client, "region", 100))[-1]
    assert len(final.hits) == stored.num_chunks
    (version,) = set(re.findall(r"north\d", str(final.hits)))
    assert version in stored.text


async def test_a_search_without_a_reader_ends(client: RetrieverClient) -> None:
    await client.upsert_document(document("d", service_page("d", "north")))
    for _ in range(20):
        stages = client.search("default", "north", 1)
        assert (await anext(stages)).hits
        await stages.aclose()
    assert (await client.upsert_document(document("d", "new"))).changed


async def test_similar_chunks_are_best_first_without_the_chunk_itself(
    client: RetrieverClient,
) -> None:
    for name in ("billing", "search", "mail"):
        await client.upsert_document(document(name, service_page(name, "north")))
    found = await client.similar_chunks("default", "billing", 4)
    stored = await client.get_document("default", "billing")
    assert len(found) == stored.num_chunks
    for ordinal, similar in enumerate(found):
        assert len(similar) == 4
        assert ("billing", ordinal) not in {(one.document_id, one.ordinal) for one in similar}
        assert [one.score for one in similar] == sorted((s.score for s in similar), reverse=True)
    # The last paragraph is the same on every page.
    assert {one.document_id for one in found[-1][:2]} == {"search", "mail"}
    assert found[-1][0].score > 0.9


async def test_similar_chunks_of_an_unknown_document_or_too_many_are_refused(
    client: RetrieverClient,
) -> None:
    with pytest.raises(NotFound):
        await client.similar_chunks("default", "nowhere", 4)
    await client.upsert_document(document("billing", service_page("billing", "north")))
    for top_k in (0, service.MAX_SIMILAR + 1):
        with pytest.raises(InvalidInput, match="top_k"):
            await client.similar_chunks("default", "billing", top_k)


async def test_a_report_replaces_the_one_of_its_name(client: RetrieverClient) -> None:
    with pytest.raises(NotFound):
        await client.get_report("quality")
    await client.put_report("quality", b"first")
    await client.put_report("quality", b"second")
    await client.put_report("other", b"third")
    report = await client.get_report("quality")
    assert report.body == b"second"
    assert report.updated_unix_ms > 0
    with pytest.raises(TooLarge):
        await client.put_report("quality", bytes(service.MAX_REPORT_BYTES + 1))


async def test_a_report_survives_a_restart(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = tokenizer_of(tiny_model)
    async with serving(make_knowledge_base(tmp_path, tokenizer)) as client:
        await client.put_report("quality", b"kept")
    async with serving(make_knowledge_base(tmp_path, tokenizer)) as client:
        assert (await client.get_report("quality")).body == b"kept"
