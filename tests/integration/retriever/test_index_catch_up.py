"""Searches see every committed change, although an index failed or its files are damaged."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ragcache_retriever import readiness
from ragcache_retriever.documents.collection import CollectionSettings
from ragcache_retriever.knowledge_base import catch_up
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.ranking.search import Search, SearchMode
from ragcache_retriever.search.faiss_index import FaissIndex, FaissIndexes
from ragcache_retriever.store.records import Document
from ragcache_retriever.store.sqlite.files.backup import INDEXES_FOLDER
from tests.kit.retriever import (
    make_knowledge_base,
    serving,
    tokenizer_of,
)
from tests.kit.wait import until

WORDS = ("apple", "banana", "cherry")


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "PERIOD_S", 0.02)
    monkeypatch.setattr(catch_up, "MIN_PAUSE_S", 0.02)


@contextlib.asynccontextmanager
async def loaded(folder: Path, model: Path) -> AsyncIterator[KnowledgeBase]:
    knowledge_base = make_knowledge_base(folder, tokenizer_of(model))
    await knowledge_base.load()
    try:
        yield knowledge_base
    finally:
        await knowledge_base.close()


def page(word: str) -> Document:
    return Document(word, word, f"All about the {word}.", 1, {})


async def found(knowledge_base: KnowledgeBase, word: str) -> bool:
    """Whether the index of vectors finds a page."""
    query = Search("default", f"All about the {word}.", 1, mode=SearchMode.DENSE)
    stages = [stage async for stage in knowledge_base.searching.search(query)]
    hits = [stages[-1].texts[hit.row].chunk.text for hit in stages[-1].hits]
    return hits == [f"All about the {word}."]


async def until_found(knowledge_base: KnowledgeBase, word: str) -> None:
    await until(lambda: found(knowledge_base, word), word)


def fail(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, times: int) -> list[str]:
    """Let the next calls of a method fail as on a full disk. Return the list of failures."""
    method = getattr(owner, name)
    failures: list[str] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        if len(failures) < times:
            failures.append(name)
            raise OSError(28, "No space left on device")
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    return failures


async def test_an_upsert_whose_index_failed_is_found_later(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loaded(tmp_path, tiny_model) as knowledge_base:
        await knowledge_base.ingestion.upsert("default", page("apple"))
        fail(monkeypatch, FaissIndex, "apply", times=1)
        assert (await knowledge_base.ingestion.upsert("default", page("banana"))).changed
        await until_found(knowledge_base, "banana")


async def test_damaged_files_are_replaced_without_a_write(tmp_path: Path, tiny_model: Path) -> None:
    async with loaded(tmp_path, tiny_model) as knowledge_base:
        for word in WORDS:
            await knowledge_base.ingestion.upsert("default", page(word))
    # This start builds the files of the index. So few rows are in memory only before.
    async with loaded(tmp_path, tiny_model):
        pass
    [file] = (tmp_path / INDEXES_FOLDER).rglob("*.faiss")
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 16] = bytes(16)
    file.write_bytes(content)
    async with loaded(tmp_path, tiny_model) as knowledge_base:
        for word in WORDS:
            await until_found(knowledge_base, word)


async def test_a_load_that_fails_unexpectedly_is_repeated(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "FAILURE_PAUSE_S", 0.02)
    failures = fail(monkeypatch, FaissIndexes, "open", times=2)
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model))
    problems: list[str] = []
    await readiness.load(knowledge_base, problems.append)
    assert len(failures) == 2
    assert [one for one in problems if "No space" in one]
    await knowledge_base.ingestion.upsert("default", page("apple"))
    assert await found(knowledge_base, "apple")
    await knowledge_base.close()


async def test_a_collection_whose_index_cannot_be_opened_is_building_and_opened_later(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model))
    async with serving(knowledge_base) as client:
        await knowledge_base.ingestion.upsert("default", page("apple"))
        with monkeypatch.context() as broken:
            failures = fail(broken, FaissIndexes, "open", times=1_000_000)
            await knowledge_base.put_collection("team", CollectionSettings())
            assert failures
            status = await client.status()
            states = {one.collection: (one.vectors, one.building) for one in status.indexes}
            assert states == {"default": (1, False), "team": (0, True)}

        async def are_built() -> bool:
            return not any(one.building for one in (await client.status()).indexes)

        await until(are_built)
        await knowledge_base.ingestion.upsert("team", page("banana"))
        assert {one.vectors for one in await knowledge_base.collections.index_statuses()} == {1}


async def test_an_index_that_cannot_be_opened_delays_no_other_one(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "MAX_PAUSE_S", 0.1)
    async with loaded(tmp_path, tiny_model) as knowledge_base:
        await knowledge_base.ingestion.upsert("default", page("apple"))
        refused = fail(monkeypatch, FaissIndexes, "open", times=1_000_000)
        await knowledge_base.put_collection("team", CollectionSettings())
        fail(monkeypatch, FaissIndex, "apply", times=1)
        await knowledge_base.ingestion.upsert("default", page("banana"))
        await until_found(knowledge_base, "banana")
        assert await found(knowledge_base, "apple")
        assert len(refused) > 1, "it was tried again"
