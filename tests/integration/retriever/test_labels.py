"""A chunk's tokens begin with a label; its text, its size and its embedding do not have it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from ragcache_retriever.documents.tokenizer import ServingTokenizer
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.retriever import WordEmbedder, digest_of, make_knowledge_base, serving, tokenizer_of

TEXT = "It weighs 48 kg. Two persons carry it."
HANDBOOK = """# Pump P4

Keep this page near the machine, and give it to the next owner.

## Oil

The oil is changed every 200 hours. Old oil is collected in a can with a lid. The filter goes with
it. A ring seals the plug, and a new one costs little. Hot oil runs out faster. Never open the plug
while the motor turns. The level is checked at the glass on the left side.

## Weight

It weighs 48 kg. Two persons carry it by the handles. A crane takes the ring on its top. Straps hold
it in a van. It stays upright all the time. Wood below its feet keeps the floor clean.
"""


@pytest.fixture
def tokenizer(tiny_model: Path) -> ServingTokenizer:
    return tokenizer_of(tiny_model)


@pytest.fixture
def embedder() -> WordEmbedder:
    return WordEmbedder()


@pytest.fixture
def knowledge_base(
    tmp_path: Path, tokenizer: ServingTokenizer, embedder: WordEmbedder
) -> KnowledgeBase:
    return make_knowledge_base(tmp_path, tokenizer, embedder=embedder)


@pytest_asyncio.fixture
async def client(knowledge_base: KnowledgeBase) -> AsyncIterator[RetrieverClient]:
    async with serving(knowledge_base) as client:
        yield client


async def chunks_of(client: RetrieverClient, query: str = "oil weight pump") -> list[pb.Chunk]:
    """Return all found chunks in document order, each with the window of none."""
    *_, final = [stage async for stage in client.search("default", query, 100)]
    return sorted((hit.chunk for hit in final.hits), key=lambda chunk: chunk.ordinal)


async def test_each_passage_of_a_handbook_says_what_it_is(
    client: RetrieverClient, tokenizer: ServingTokenizer
) -> None:
    reply = await client.upsert_document(
        pb.Document(
            collection="default",
            id="p4.md",
            text=HANDBOOK,
            content_type=pb.CONTENT_TYPE_MARKDOWN,
        )
    )
    chunks = await chunks_of(client)
    assert len(chunks) > 3
    for chunk in chunks:
        begin = (chunk.label + chunk.text).split("\n", 1)[0]
        assert "Pump P4" in begin
        assert chunk.heading_path[-1] in chunk.label + chunk.text[:40]
        assert chunk.text in HANDBOOK
        assert chunk.token_ids == tokenizer.token_ids(chunk.label + chunk.text)
    assert list(reply.chunks) == [chunk.label + chunk.text for chunk in chunks]


async def test_a_new_title_gives_new_tokens_and_deletes_the_old(
    client: RetrieverClient, tokenizer: ServingTokenizer
) -> None:
    page = pb.Document(collection="default", id="17", title="Pump P4", text=TEXT)
    await client.upsert_document(page)
    page.title = "Pump P5"
    reply = await client.upsert_document(page)
    [update] = reply.deletes
    assert list(update.token_digests) == [digest_of(tokenizer, f"[Pump P4]\n{TEXT}")]
    [chunk] = await chunks_of(client)
    assert (chunk.label, chunk.text) == ("[Pump P5]\n", TEXT)
    assert chunk.token_ids == tokenizer.token_ids(f"[Pump P5]\n{TEXT}")


async def test_equal_texts_of_other_documents_have_other_tokens(
    client: RetrieverClient, tokenizer: ServingTokenizer
) -> None:
    for name in ("P4", "P8"):
        await client.upsert_document(
            pb.Document(collection="default", id=name, title=f"Pump {name}", text=TEXT)
        )
    deleted = await client.delete_document("default", "P4")
    digests = [digest for delete in deleted.deletes for digest in delete.token_digests]
    assert digests == [digest_of(tokenizer, f"[Pump P4]\n{TEXT}")]


async def test_labels_can_be_turned_off_for_documents_that_are_there(
    client: RetrieverClient,
    knowledge_base: KnowledgeBase,
    tokenizer: ServingTokenizer,
    embedder: WordEmbedder,
) -> None:
    page = pb.Document(collection="default", id="p4.txt", title="Pump P4", text=TEXT)
    await client.upsert_document(page)
    assert (await client.get_collection("default")).labels
    embedder.embedded.clear()
    await client.put_collection(pb.Collection(name="default", labels=False), keep_unset=True)
    await knowledge_base.wait_until_idle()
    assert embedder.embedded == [], "only the tokens have changed"
    assert not (await client.get_collection("default")).labels
    [chunk] = await chunks_of(client)
    assert (chunk.label, chunk.token_ids) == ("", tokenizer.token_ids(TEXT))
    [delete] = (await client.claim_deletes(10)).deletes
    assert list(delete.token_digests) == [digest_of(tokenizer, f"[Pump P4]\n{TEXT}")]
    page.text = f"{TEXT} It is red."
    assert list((await client.upsert_document(page)).chunks) == [page.text]
