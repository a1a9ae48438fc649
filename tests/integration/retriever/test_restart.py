"""What a restart keeps, and what it rebuilds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.documents.collection import Chunking, CollectionDefaults
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.helpers.retriever_parts import (
    WordEmbedder,
    digest_of,
    make_knowledge_base,
    serving,
    tokenizer_of,
)

TEXT = "# Page\n\n" + "\n\n".join(
    f"The part number {i} of this page says something of its own. It is number {i}."
    for i in range(8)
)


async def ingest(folder: Path, model: Path, **fields: object) -> tuple[pb.Collection, WordEmbedder]:
    """Serve a folder, put the page into it; returns the collection and what was embedded."""
    embedder = WordEmbedder()
    knowledge_base = make_knowledge_base(folder, tokenizer_of(model), embedder=embedder)
    async with serving(knowledge_base) as client:
        await client.upsert_document(pb.Document(collection="default", id="d", text=TEXT))
        return await client.get_collection("default"), embedder


async def test_a_restart_loses_nothing_and_embeds_nothing(tmp_path: Path, tiny_model: Path) -> None:
    before, first = await ingest(tmp_path, tiny_model)
    assert len(first.embedded) == before.chunks
    after, second = await ingest(tmp_path, tiny_model)
    assert after == before
    assert second.embedded == []
    embedder = WordEmbedder()
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    async with serving(knowledge_base) as client:
        stages = [stage async for stage in client.search("default", "part number 5", 100)]
    assert len(stages[-1].hits) == before.chunks
    assert "number 5" in stages[-1].hits[0].chunk.text


async def test_another_embedder_embeds_everything_again(tmp_path: Path, tiny_model: Path) -> None:
    before, _ = await ingest(tmp_path, tiny_model)
    embedder = WordEmbedder(identity="other", dimension=32)
    tokenizer = tokenizer_of(tiny_model)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer, embedder=embedder, now=1_800_000_000)
    async with serving(knowledge_base) as client:
        # Its owner changed nothing.
        assert (await client.get_document("default", "d")).updated_unix_ms == 1_700_000_000_000
        assert len(embedder.embedded) == before.chunks
        stages = [stage async for stage in client.search("default", "part number 5", 100)]
        assert len(stages[-1].hits) == before.chunks


async def test_other_defaults_split_collections_that_follow_them(
    tmp_path: Path, tiny_model: Path
) -> None:
    async with serving(make_knowledge_base(tmp_path, tokenizer_of(tiny_model))) as client:
        own = pb.Chunking(size_tokens=64, overlap_tokens=16)
        await client.put_collection(pb.Collection(name="own", chunking=own))
        for name in ("default", "own"):
            await client.upsert_document(pb.Document(collection=name, id="d", text=TEXT))
        before = {c.name: c for c in await client.list_collections()}
    smaller = CollectionDefaults(Chunking(size_tokens=32, overlap_tokens=0), window=0)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), defaults=smaller)
    async with serving(knowledge_base) as client:
        after = {c.name: c for c in await client.list_collections()}
    assert after["default"].chunks > before["default"].chunks
    assert after["default"].window == 0
    assert after["own"].chunks == before["own"].chunks


async def test_only_changed_chunks_are_embedded(tmp_path: Path, tiny_model: Path) -> None:
    embedder = WordEmbedder()
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    async with serving(knowledge_base) as client:
        page = pb.Document(collection="default", id="d", text=TEXT)
        await client.upsert_document(page)
        embedder.embedded.clear()
        page.text = TEXT.replace("It is number 7.", "It is the last.")
        reply = await client.upsert_document(page)
        assert reply.changed
        assert 1 <= len(embedder.embedded) < reply.document.num_chunks


class FailingEmbedder(WordEmbedder):
    """Embeds one text of a document and fails then, while it is broken."""

    broken = True

    async def embed(self, texts, *, urgent):  # type: ignore[no-untyped-def]
        if self.broken and not urgent:
            await super().embed(texts[:1], urgent=urgent)
            raise Unavailable("embedder", "gone")
        return await super().embed(texts, urgent=urgent)


async def test_a_document_that_cannot_be_embedded_changes_nothing(
    tmp_path: Path, tiny_model: Path
) -> None:
    embedder = FailingEmbedder()
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    async with serving(knowledge_base) as client:
        page = pb.Document(collection="default", id="d", text=TEXT)
        with pytest.raises(Unavailable, match="gone"):
            await client.upsert_document(page)
        assert (await client.get_collection("default")).documents == 0
        embedder.broken = False
        assert (await client.upsert_document(page)).changed


async def test_a_load_that_failed_can_be_repeated(tmp_path: Path, tiny_model: Path) -> None:
    before, _ = await ingest(tmp_path, tiny_model)
    embedder = FailingEmbedder(identity="other")
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    with pytest.raises(Unavailable, match="gone"):
        await knowledge_base.load()
    with pytest.raises(Unavailable, match="loading"):
        await knowledge_base.collections()
    embedder.broken = False
    async with serving(knowledge_base) as client:
        stages = [stage async for stage in client.search("default", "part", 100)]
        assert len(stages[-1].hits) == before.chunks


class PickyEmbedder(WordEmbedder):
    """Refuses texts about volcanoes."""

    async def embed(self, texts, *, urgent):  # type: ignore[no-untyped-def]
        if any("volcano" in text for text in texts):
            raise InvalidInput("document.text", "the embedder refuses it", "send another")
        return await super().embed(texts, urgent=urgent)


async def test_a_document_that_a_new_embedder_refuses_blocks_no_other(
    tmp_path: Path, tiny_model: Path
) -> None:
    tokenizer = tokenizer_of(tiny_model)
    async with serving(make_knowledge_base(tmp_path, tokenizer)) as client:
        for name in ("billing", "volcano", "zebra"):
            text = f"All about the {name}."
            await client.upsert_document(pb.Document(collection="default", id=name, text=text))
    embedder = PickyEmbedder(identity="picky")
    async with serving(make_knowledge_base(tmp_path, tokenizer, embedder=embedder)) as client:
        stages = [stage async for stage in client.search("default", "all about", 10)]
        assert sorted(hit.chunk.document_id for hit in stages[-1].hits) == ["billing", "zebra"]
        assert (await client.get_document("default", "volcano")).text == "All about the volcano."
        reply = await client.delete_document("default", "volcano")
        assert list(reply.deletes[0].token_digests) == [
            digest_of(tokenizer, "All about the volcano.")
        ]


async def test_a_start_reports_its_progress(tmp_path: Path, tiny_model: Path) -> None:
    async with serving(make_knowledge_base(tmp_path, tokenizer_of(tiny_model))) as client:
        for number in range(3):
            document = pb.Document(collection="default", id=f"d{number}", text=TEXT)
            await client.upsert_document(document)
    embedder = WordEmbedder(identity="other", dimension=32)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    said: list[str] = []
    await knowledge_base.load(said.append)
    await knowledge_base.close()
    assert said == [
        "loading the embedder",
        "loading the index",
        *(f"indexing {number} of 3" for number in (1, 2, 3)),
    ]


async def test_a_start_with_another_chunking_leaves_its_deletes_in_the_outbox(
    tmp_path: Path, tiny_model: Path
) -> None:
    tokenizer = tokenizer_of(tiny_model)
    async with serving(make_knowledge_base(tmp_path, tokenizer)) as client:
        page = pb.Document(collection="default", id="d", text=TEXT)
        chunks = (await client.upsert_document(page)).chunks
    smaller = CollectionDefaults(Chunking(size_tokens=32, overlap_tokens=0), window=0)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer, defaults=smaller)
    async with serving(knowledge_base) as client:
        [delete] = (await client.claim_deletes(10)).deletes
    assert delete.names_document
    assert set(delete.token_digests) == {digest_of(tokenizer, text) for text in chunks}


async def test_documents_that_cannot_be_split_now_keep_the_retriever_from_being_ready(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ingest(tmp_path, tiny_model)
    larger = CollectionDefaults(Chunking(size_tokens=128, overlap_tokens=0), window=1)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), defaults=larger)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "missing"))
        with pytest.raises(Unavailable, match="does not start"):
            await knowledge_base.load()
    async with serving(knowledge_base) as client:
        assert (await client.get_collection("default")).chunking.size_tokens == 128
