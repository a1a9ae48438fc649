"""What a restart keeps, and what it rebuilds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_retriever.documents.collection import Chunking, CollectionDefaults
from ragcache_retriever.documents.tokenizer import ServingTokenizer
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.retriever import (
    HeldEmbedder,
    WordEmbedder,
    digest_of,
    make_knowledge_base,
    serving,
    stages_of,
    status_of,
    tokenizer_of,
)
from tests.kit.wait import until

TEXT = "# Page\n\n" + "\n\n".join(
    f"The part number {i} of this page says something of its own. It is number {i}."
    for i in range(8)
)


async def best(
    client: RetrieverClient, query: str, mode: pb.SearchMode.ValueType = pb.SEARCH_MODE_AUTO
) -> pb.Chunk:
    """Return the best hit of the final stage."""
    request = pb.SearchRequest(collection="default", query=query, top_k=1, mode=mode)
    return (await stages_of(client, request))[-1].hits[0].chunk


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


async def test_another_embedder_embeds_everything_again_in_the_background(
    tmp_path: Path, tiny_model: Path
) -> None:
    before, _ = await ingest(tmp_path, tiny_model)
    embedder = HeldEmbedder(identity="other", dimension=32)
    tokenizer = tokenizer_of(tiny_model)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer, embedder=embedder, now=1_800_000_000)
    async with serving(knowledge_base) as client:
        # The vectors of the old one compare with none of the new, so words find chunks meanwhile.
        assert "number 5" in (await best(client, "part number 5")).text
        info = await client.get_collection("default")
        assert (info.remake.documents, info.remake.reason) == (1, "embedder")
        with pytest.raises(Unavailable, match="being prepared for another one"):
            await best(client, "part number 5", mode=pb.SEARCH_MODE_DENSE)
        [index] = (await status_of(client)).indexes
        assert (index.lexical_only, index.remake.documents) == (True, 1)
        embedder.hold.set()
        await knowledge_base.wait_until_idle()
        # Its owner changed nothing.
        assert (await client.get_document("default", "d")).updated_unix_ms == 1_700_000_000_000
        assert len([text for text in embedder.embedded if text.startswith("d\n")]) == before.chunks
        stages = [stage async for stage in client.search("default", "part number 5", 100)]
        assert len(stages[-1].hits) == before.chunks
        assert stages[-1].hits[0].legs.HasField("dense")
        [index] = (await status_of(client)).indexes
        assert (index.lexical_only, index.vectors) == (False, before.chunks)
        # No text was removed, so no stored KV is.
        assert not (await client.claim_deletes(10)).deletes


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
        await knowledge_base.wait_until_idle()
        after = {c.name: c for c in await client.list_collections()}
    assert after["default"].chunks > before["default"].chunks
    assert after["default"].window == 0
    assert after["own"].chunks == before["own"].chunks


async def test_old_chunks_serve_until_all_documents_are_split_again(
    tmp_path: Path, tiny_model: Path
) -> None:
    before, _ = await ingest(tmp_path, tiny_model)
    embedder = HeldEmbedder()
    smaller = CollectionDefaults(Chunking(size_tokens=32, overlap_tokens=0), window=0)
    knowledge_base = make_knowledge_base(
        tmp_path, tokenizer_of(tiny_model), embedder=embedder, defaults=smaller
    )
    async with serving(knowledge_base) as client:
        stages = [stage async for stage in client.search("default", "part number 5", 100)]
        assert len(stages[-1].hits) == before.chunks
        # A document that comes now is in both, and found at once.
        embedder.hold.set()
        await client.upsert_document(pb.Document(collection="default", id="e", text="# Zebra"))
        assert (await best(client, "zebra")).document_id == "e"
        await knowledge_base.wait_until_idle()
        assert (await best(client, "zebra")).document_id == "e"
        info = await client.get_collection("default")
        assert not info.HasField("remake")
        assert info.chunks > before.chunks + 1


async def test_a_change_that_is_taken_back_keeps_the_old_chunks(
    tmp_path: Path, tiny_model: Path
) -> None:
    before, _ = await ingest(tmp_path, tiny_model)
    embedder = HeldEmbedder()
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    async with serving(knowledge_base) as client:
        chunking = pb.Chunking(size_tokens=32, overlap_tokens=0)
        changed = await client.put_collection(pb.Collection(name="default", chunking=chunking))
        assert changed.remake.reason == "chunking"
        embedder.hold.set()
        again = await client.put_collection(pb.Collection(name="default"))
        assert not again.HasField("remake")
        await knowledge_base.wait_until_idle()
        stages = [stage async for stage in client.search("default", "part number 5", 100)]
        assert len(stages[-1].hits) == before.chunks


async def test_a_remake_continues_after_a_restart(tmp_path: Path, tiny_model: Path) -> None:
    async with serving(make_knowledge_base(tmp_path, tokenizer_of(tiny_model))) as client:
        for number in range(6):
            text = f"All about number {number}."
            await client.upsert_document(
                pb.Document(collection="default", id=f"d{number}", text=text)
            )
    first = HeldEmbedder(identity="other", num_free=3)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=first)
    async with serving(knowledge_base) as client:

        async def has_done_three() -> bool:
            return (await client.get_collection("default")).remake.documents_done >= 3

        await until(has_done_three)
    second = WordEmbedder(identity="other")
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=second)
    async with serving(knowledge_base) as client:
        await knowledge_base.wait_until_idle()
        assert len(second.embedded) == 3
        assert (await best(client, "number 5")).document_id == "d5"


async def test_another_tokenizer_keeps_the_embeddings(tmp_path: Path, tiny_model: Path) -> None:
    before, _ = await ingest(tmp_path, tiny_model)
    tokenizer = tokenizer_of(tiny_model)
    other = ServingTokenizer(tokenizer.content, "another identity")
    embedder = WordEmbedder()
    knowledge_base = make_knowledge_base(tmp_path, other, embedder=embedder)
    async with serving(knowledge_base) as client:
        await knowledge_base.wait_until_idle()
        assert embedder.embedded == []
        chunk = await best(client, "part number 5")
        assert chunk.tokenizer_identity == "another identity"
        assert chunk.token_ids == tokenizer.token_ids(chunk.text)
        assert (await client.get_collection("default")).chunks == before.chunks


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


async def test_an_embedder_that_fails_interrupts_a_remake_and_nothing_else(
    tmp_path: Path, tiny_model: Path
) -> None:
    before, _ = await ingest(tmp_path, tiny_model)
    embedder = FailingEmbedder(identity="other")
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    async with serving(knowledge_base) as client:
        await until(lambda: bool(embedder.embedded))
        assert "number 5" in (await best(client, "part number 5")).text
        embedder.broken = False
        await knowledge_base.wait_until_idle()
        stages = [stage async for stage in client.search("default", "part", 100)]
        assert len(stages[-1].hits) == before.chunks


class UnreachableEmbedder(WordEmbedder):
    """Does not start at first."""

    is_reachable = False

    async def start(self) -> None:
        if not self.is_reachable:
            raise Unavailable("embedder", "gone")


async def test_a_load_that_failed_can_be_repeated(tmp_path: Path, tiny_model: Path) -> None:
    before, _ = await ingest(tmp_path, tiny_model)
    embedder = UnreachableEmbedder()
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=embedder)
    with pytest.raises(Unavailable, match="gone"):
        await knowledge_base.load()
    with pytest.raises(Unavailable, match="loading"):
        await knowledge_base.collections.infos()
    embedder.is_reachable = True
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
    knowledge_base = make_knowledge_base(tmp_path, tokenizer, embedder=embedder)
    async with serving(knowledge_base) as client:
        await knowledge_base.wait_until_idle()
        stages = [stage async for stage in client.search("default", "all about", 10)]
        assert sorted(hit.chunk.document_id for hit in stages[-1].hits) == ["billing", "zebra"]
        assert (await client.get_document("default", "volcano")).text == "All about the volcano."
        reply = await client.delete_document("default", "volcano")
        assert list(reply.deletes[0].token_digests) == [
            digest_of(tokenizer, "[volcano]\nAll about the volcano.")
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
        await knowledge_base.wait_until_idle()
        [delete] = (await client.claim_deletes(10)).deletes
    assert delete.names_document
    assert set(delete.token_digests) == {digest_of(tokenizer, text) for text in chunks}


async def test_documents_that_cannot_be_split_now_are_split_later(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = await ingest(tmp_path, tiny_model)
    smaller = CollectionDefaults(Chunking(size_tokens=32, overlap_tokens=0), window=1)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), defaults=smaller)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "missing"))
        async with serving(knowledge_base) as client:
            with pytest.raises(Unavailable, match="does not start"):
                await client.upsert_document(pb.Document(collection="default", id="e", text="x"))
            assert "number 5" in (await best(client, "part number 5")).text
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), defaults=smaller)
    async with serving(knowledge_base) as client:
        await knowledge_base.wait_until_idle()
        assert (await client.get_collection("default")).chunks > before.chunks
