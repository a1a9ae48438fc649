"""Documents that are written later: durable, in turns, and never against a later change."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ragcache_core.cost.text_rate import TextRate
from ragcache_core.errors import InvalidInput, NotFound, Overloaded, TooLarge
from ragcache_retriever import preparer
from ragcache_retriever.embedding.embedder import Embedder
from ragcache_retriever.knowledge_base import ingestion, later_writes
from ragcache_retriever.knowledge_base.later_writes import MOST_OF_ONE, NUM_WORKERS
from ragcache_wire.asking import asking
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import retriever_pb2 as pb
from tests.kit.retriever import (
    HeldEmbedder,
    make_knowledge_base,
    serving,
    tokenizer_of,
)
from tests.kit.wait import until

PENDING, DONE = pb.OPERATION_STATE_PENDING, pb.OPERATION_STATE_DONE
FAILED, CANCELLED = pb.OPERATION_STATE_FAILED, pb.OPERATION_STATE_CANCELLED


def document(name: str, text: str = "The pager is on the desk.") -> pb.Document:
    return pb.Document(collection="default", id=name, text=text)


@asynccontextmanager
async def retriever(
    folder: Path, model: Path, embedder: Embedder | None = None
) -> AsyncIterator[RetrieverClient]:
    made = make_knowledge_base(folder, tokenizer_of(model), embedder=embedder)
    async with serving(made) as client:
        yield client


async def ended(client: RetrieverClient, operation: pb.Operation, owner: str = "") -> pb.Operation:
    """Wait until an operation has ended."""

    async def has_ended() -> pb.Operation | None:
        found = await client.get_operation(operation.id, owner)
        return None if found.state == PENDING else found

    found = await until(has_ended)
    assert found is not None
    return found


async def test_a_document_is_written_once_and_its_operation_says_so(
    tmp_path: Path, tiny_model: Path
) -> None:
    async with retriever(tmp_path, tiny_model) as client:
        sent = await client.submit_document(document("a"), "red")
        assert (sent.state, sent.collection, sent.document_id) == (PENDING, "default", "a")
        done = await ended(client, sent, "red")
        assert (done.state, done.changed, done.num_chunks, done.error) == (DONE, True, 1, "")
        assert (await client.get_document("default", "a")).text == document("a").text
        # The same content is the same operation, as long as it is what is stored.
        assert await client.submit_document(document("a"), "red") == done
        other = await client.submit_document(document("a", "Another text."), "red")
        assert other.id != done.id
        assert (await ended(client, other, "red")).changed
        again = await client.submit_document(document("a"), "red")
        assert (again.id, again.state) == (done.id, PENDING)
        assert (await ended(client, again, "red")).changed


async def test_an_operation_is_known_to_its_owner_only(tmp_path: Path, tiny_model: Path) -> None:
    async with retriever(tmp_path, tiny_model) as client:
        sent = await client.submit_document(document("a"), "red")
        for owner in ("blue", ""):
            with pytest.raises(NotFound, match="send the document again"):
                await client.get_operation(sent.id, owner)
            assert (await client.submit_document(document("a"), owner)).id != sent.id


async def test_a_restart_goes_on_with_what_is_pending(tmp_path: Path, tiny_model: Path) -> None:
    held = HeldEmbedder()
    async with retriever(tmp_path, tiny_model, held) as client:
        sent = [await client.submit_document(document(f"d{i}"), "") for i in range(5)]
        await until(lambda: held.num_free < 0)
    async with retriever(tmp_path, tiny_model) as client:
        for operation in sent:
            assert (await ended(client, operation)).state == DONE
        found = await client.list_documents("default")
        assert [one.id for one in found.documents] == [f"d{i}" for i in range(5)]


async def test_keys_take_turns_and_one_leaves_a_worker_to_others(
    tmp_path: Path, tiny_model: Path
) -> None:
    held = HeldEmbedder()
    async with retriever(tmp_path, tiny_model, held) as client:
        with asking("red"):
            red = [await client.submit_document(document(f"red{i}"), "") for i in range(10)]
        await until(lambda: held.num_free == -MOST_OF_ONE)
        with asking("blue"):
            blue = await client.submit_document(document("blue"), "")
        await until(lambda: held.num_free == -NUM_WORKERS)
        held.hold.set()
        await ended(client, blue)
        for operation in red:
            assert (await ended(client, operation)).state == DONE


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("change", ["delete", "collection", "submit", "write"])
async def test_a_later_change_of_the_document_cancels_what_is_pending(
    tmp_path: Path, tiny_model: Path, change: str, *, is_begun: bool
) -> None:
    held = HeldEmbedder()
    newer = pb.Document(collection="c", id="a", text="The new text.")
    async with retriever(tmp_path, tiny_model, held) as client:
        await client.put_collection(pb.Collection(name="c"))
        for i in range(NUM_WORKERS - is_begun):
            with asking(f"other{i}"):
                await client.submit_document(document(f"d{i}"), "")
        await until(lambda: held.num_free == is_begun - NUM_WORKERS)
        sent = await client.submit_document(
            pb.Document(collection="c", id="a", text="The old text."), ""
        )
        await until(lambda: held.num_free == -NUM_WORKERS)
        # None of these waits for the operation.
        match change:
            case "delete":
                await client.delete_document("c", "a")
            case "collection":
                await client.delete_collection("c")
            case "submit":
                await client.submit_document(newer, "")
            case _:
                held.num_free = 1
                assert (await client.upsert_document(newer)).changed
        assert (await client.get_operation(sent.id, "")).state == CANCELLED
        held.hold.set()
        if change in ("delete", "collection"):
            # This one begins after it.
            await ended(client, await client.submit_document(document("last"), ""))
            with pytest.raises(NotFound):
                await client.get_document("c", "a")
        else:
            await until(lambda: _has_text(client, newer.text))
        assert (await client.get_operation(sent.id, "")).state == CANCELLED


async def _has_text(client: RetrieverClient, text: str) -> bool:
    try:
        return (await client.get_document("c", "a")).text == text
    except NotFound:
        return False


async def test_a_document_that_takes_too_long_to_embed_names_the_field_and_the_fix(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldEmbedder()
    made = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), embedder=held)
    text = "The pager is on the desk. " * (preparer.MEASURED_CHARS // 25)
    async with serving(made) as client:
        short = 0.05
        made.preparer._rates[short] = TextRate(short)
        for limit in ("EMBED_LIMIT_S", "LATER_EMBED_LIMIT_S"):
            monkeypatch.setattr(ingestion, limit, short)
            monkeypatch.setattr(preparer, limit, short)
        with pytest.raises(TooLarge, match=r"document\.text.* chunks.* respond-async"):
            await client.upsert_document(document("a", text))
        failed = await ended(client, await client.submit_document(document("a", text), ""))
        assert failed.state == FAILED
        told = json.loads(failed.error)
        assert (told["type"], told["field"]) == ("too_large", "document.text")
        assert "divide the document" in told["fix"]


async def test_one_owner_leaves_room_to_others(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(later_writes, "MAX_PENDING_BYTES", 100_000)
    held = HeldEmbedder()
    async with retriever(tmp_path, tiny_model, held) as client:
        for i in range(10):
            await client.submit_document(document(f"d{i}", "word " * 1000), "red")
        with pytest.raises(Overloaded, match="wait to be written"):
            await client.submit_document(document("d10", "word " * 1000), "red")
        await client.submit_document(document("a", "word " * 1000), "blue")
        held.hold.set()


async def test_a_document_that_is_refused_is_refused_at_once(
    tmp_path: Path, tiny_model: Path
) -> None:
    async with retriever(tmp_path, tiny_model) as client:
        with pytest.raises(InvalidInput, match="is empty"):
            await client.submit_document(document("a", " "), "")
        with pytest.raises(NotFound):
            await client.submit_document(pb.Document(collection="no", id="a", text="x"), "")


async def test_lists_that_take_long_to_split_delay_their_own_key_only(
    tmp_path: Path, tiny_model: Path
) -> None:
    items, words = "\n- " * 100_000, "The pager is on the desk. " * 11_000
    async with retriever(tmp_path, tiny_model) as client:
        with asking("red"):
            red = [
                await client.submit_document(document(f"red{i}", f"{items}{i}"), "red")
                for i in range(8)
            ]
        with asking("blue"):
            blue = await client.submit_document(document("blue", words), "blue")
        assert (await ended(client, blue, "blue")).state == DONE
        states = [(await client.get_operation(one.id, "red")).state for one in red]
        # Those that had begun, and one for each turn of the splitter and of a worker.
        assert states.count(PENDING) >= 4
        for one in red:
            await client.delete_document("default", one.document_id)
