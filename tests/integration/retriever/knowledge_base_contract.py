"""What a knowledge base has to do on every backend. A module that runs it has a ``harness``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import pytest

from ragcache_core.errors import NotFound, RagCacheError, Unavailable
from ragcache_core.retrieval.filters import And, Exists, Filter, In, Not
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.documents.collection import CollectionSettings
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.ranking.search import LegScores, Search, SearchMode
from ragcache_retriever.store.records import Document
from tests.kit.wait import until

LIMIT_S = 60
MODES = [SearchMode.DENSE, SearchMode.LEXICAL, SearchMode.HYBRID]


class KnowledgeBaseHarness(Protocol):
    """One backend."""

    async def opened(self) -> KnowledgeBase:
        """Open the documents: for the first time, again after ``close``, or as one of several."""

    @property
    def server(self) -> Server | None:
        """The server that the backend needs, or None."""


class Server(Protocol):
    """A server that can be lost."""

    def stop(self) -> None:
        """Lose it."""

    def start(self) -> None:
        """Start it again with what it has stored."""


def a_document(document_id: str, text: str, metadata: Mapping[str, str] | None = None) -> Document:
    return Document(document_id, document_id, text, 1, metadata or {})


async def found(
    knowledge_base: KnowledgeBase,
    text: str,
    mode: SearchMode = SearchMode.HYBRID,
    wanted: Filter | None = None,
    collection: str = "default",
    top_k: int = 10,
) -> list[str]:
    """Return the texts of the hits, best first."""
    query = Search(collection, text, top_k, filter=wanted, mode=mode)
    *_, final = [stage async for stage in knowledge_base.searching.search(query)]
    assert final.final
    return [final.texts[hit.row].chunk.text for hit in final.hits]


async def until_available(is_done: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the knowledge base can answer, and the answer is yes."""

    async def is_yes() -> bool:
        with contextlib.suppress(Unavailable):
            return await is_done()
        return False

    await until(is_yes)


async def until_found(knowledge_base: KnowledgeBase, text: str, wanted: list[str]) -> None:
    """Repeat a search by vectors until it finds certain texts."""

    async def is_done() -> bool:
        return sorted(await found(knowledge_base, text, SearchMode.DENSE)) == sorted(wanted)

    await until_available(is_done)


class KnowledgeBaseContract:
    """Documents of a whole knowledge base."""

    @pytest.mark.parametrize("mode", MODES)
    async def test_writes_and_deletes_are_seen_at_once(
        self, knowledge_base: KnowledgeBase, mode: SearchMode
    ) -> None:
        for i in range(5):
            result = await knowledge_base.ingestion.upsert(
                "default", a_document("d", f"apple v{i}")
            )
            assert result.changed
            assert await found(knowledge_base, "apple", mode) == [f"apple v{i}"]
        again = await knowledge_base.ingestion.upsert("default", a_document("d", "apple v4"))
        assert not again.changed
        await knowledge_base.ingestion.upsert("default", a_document("e", "apple pear"))
        assert len(await found(knowledge_base, "apple", mode)) == 2
        await knowledge_base.ingestion.delete("default", "d")
        assert await found(knowledge_base, "apple", mode) == ["apple pear"]
        with pytest.raises(NotFound):
            await knowledge_base.ingestion.document("default", "d")

    @pytest.mark.parametrize("mode", MODES)
    async def test_scores_tell_nothing_of_hidden_documents(
        self, knowledge_base: KnowledgeBase, mode: SearchMode
    ) -> None:
        """Word statistics, and what the scores of the legs are compared with."""

        async def scores() -> list[tuple[str, float, LegScores]]:
            wanted = In("public", ("yes",))
            query = Search("default", "apple merger", 10, filter=wanted, mode=mode)
            *_, final = [stage async for stage in knowledge_base.searching.search(query)]
            return [(final.texts[h.row].chunk.text, h.score, h.legs) for h in final.hits]

        for i, text in enumerate(("apple", "apple merger", "apple pear plum", "pear")):
            document = a_document(f"d{i}", text, {"public": "yes"})
            await knowledge_base.ingestion.upsert("default", document)
        before = await scores()
        assert len(before) >= 3
        for i in range(20):
            hidden = a_document(f"hidden{i}", f"merger apple number {i}", {"public": "no"})
            await knowledge_base.ingestion.upsert("default", hidden)
        assert await scores() == before

    @pytest.mark.parametrize("mode", MODES)
    async def test_filters_follow_the_documents(
        self, knowledge_base: KnowledgeBase, mode: SearchMode
    ) -> None:
        async def of_team(team: str) -> list[str]:
            return await found(knowledge_base, "apple", mode, In("team", (team,)))

        for team in ("a", "b"):
            assert await of_team(team) == []
            document = a_document(team, f"apple of {team}", {"team": team})
            await knowledge_base.ingestion.upsert("default", document)
            assert await of_team(team) == [f"apple of {team}"]
        # Only metadata changes.
        await knowledge_base.ingestion.upsert(
            "default", a_document("a", "apple of a", {"team": "b"})
        )
        assert await of_team("a") == []
        assert sorted(await of_team("b")) == ["apple of a", "apple of b"]
        neither = And((Exists("team"), Not(In("team", ("b",)))))
        assert await found(knowledge_base, "apple", mode, neither) == []
        await knowledge_base.ingestion.delete("default", "b")
        assert await of_team("b") == ["apple of a"]

    @pytest.mark.parametrize("mode", MODES)
    async def test_collections_are_apart(
        self, knowledge_base: KnowledgeBase, mode: SearchMode
    ) -> None:
        await knowledge_base.put_collection("other", CollectionSettings(index=IndexKind.FLAT))
        await knowledge_base.ingestion.upsert("default", a_document("d", "apple here"))
        await knowledge_base.ingestion.upsert("other", a_document("d", "apple there"))
        assert await found(knowledge_base, "apple", mode) == ["apple here"]
        assert await found(knowledge_base, "apple", mode, None, "other") == ["apple there"]
        await knowledge_base.put_collection("other", CollectionSettings(index=IndexKind.HNSW))
        assert await found(knowledge_base, "apple", mode, None, "other") == ["apple there"]
        await knowledge_base.delete_collection("other")
        with pytest.raises(NotFound):
            await found(knowledge_base, "apple", mode, None, "other")
        await knowledge_base.wait_until_idle()
        assert await found(knowledge_base, "apple", mode) == ["apple here"]
        await knowledge_base.put_collection("other", CollectionSettings())
        assert await found(knowledge_base, "apple", mode, None, "other") == []

    async def test_a_restart_keeps_what_was_written(self, harness: KnowledgeBaseHarness) -> None:
        first = await harness.opened()
        for name in ("d", "e", "f"):
            await first.ingestion.upsert("default", a_document(name, f"apple {name}"))
        await first.ingestion.delete("default", "e")
        await first.close()
        second = await harness.opened()
        for mode in MODES:
            assert sorted(await found(second, "apple", mode)) == ["apple d", "apple f"]
        await second.close()


class ServerContract:
    """A backend whose server is lost and comes back."""

    async def test_writes_while_the_server_is_away_are_found_when_it_is_back(
        self, harness: KnowledgeBaseHarness
    ) -> None:
        knowledge_base = await harness.opened()
        assert harness.server is not None
        for name in ("kept", "changed", "removed"):
            await knowledge_base.ingestion.upsert("default", a_document(name, f"apple {name}"))
        harness.server.stop()
        try:
            await attempted(
                knowledge_base.ingestion.upsert("default", a_document("changed", "apple new"))
            )
            await attempted(
                knowledge_base.ingestion.upsert("default", a_document("added", "apple added"))
            )
            await attempted(knowledge_base.ingestion.delete("default", "removed"))
        finally:
            harness.server.start()
        # A client repeats what was refused.
        ingestion = knowledge_base.ingestion
        for name, text in (("changed", "apple new"), ("added", "apple added")):
            document = a_document(name, text)
            await until_done(functools.partial(ingestion.upsert, "default", document))
        with contextlib.suppress(NotFound):
            await until_done(lambda: knowledge_base.ingestion.delete("default", "removed"))
        wanted = ["apple added", "apple kept", "apple new"]
        assert sorted(await found(knowledge_base, "apple", SearchMode.LEXICAL)) == wanted
        await until_found(knowledge_base, "apple", wanted)

        async def is_complete() -> bool:
            [index] = await knowledge_base.collections.index_statuses()
            return index.missed_vectors == 0 and index.vectors == len(wanted)

        await until_available(is_complete)
        # No removed row takes the place of a hit.
        for top_k in (1, 2, 3):
            hits = await found(knowledge_base, "apple", SearchMode.DENSE, top_k=top_k)
            assert len(hits) == top_k
        await knowledge_base.close()

    async def test_a_restart_completes_what_the_server_missed(
        self, harness: KnowledgeBaseHarness
    ) -> None:
        first = await harness.opened()
        assert harness.server is not None
        await first.ingestion.upsert("default", a_document("d", "apple d"))
        harness.server.stop()
        try:
            await attempted(first.ingestion.upsert("default", a_document("e", "apple e")))
            await attempted(first.ingestion.delete("default", "d"))
            await first.close()
        finally:
            harness.server.start()
        second = await harness.opened()
        await second.ingestion.upsert("default", a_document("e", "apple e"))
        with contextlib.suppress(NotFound):
            await second.ingestion.delete("default", "d")
        assert await found(second, "apple", SearchMode.DENSE) == ["apple e"]
        await second.close()


class SharedContract:
    """Several knowledge bases that change the same documents."""

    @pytest.mark.parametrize("mode", MODES)
    async def test_filters_follow_the_writes_of_another_one(
        self, harness: KnowledgeBaseHarness, mode: SearchMode
    ) -> None:
        async def of_team(knowledge_base: KnowledgeBase, team: str) -> list[str]:
            return await found(knowledge_base, "apple", mode, In("team", (team,)))

        one, other = await harness.opened(), await harness.opened()
        for i in range(3):
            await one.ingestion.upsert("default", a_document(f"d{i}", f"apple {i}", {"team": "a"}))
            assert len(await of_team(other, "a")) == i + 1
        await other.ingestion.upsert("default", a_document("d0", "apple 0", {"team": "b"}))
        assert len(await of_team(one, "a")) == 2
        assert await of_team(one, "b") == ["apple 0"]
        await one.ingestion.delete("default", "d1")
        assert await of_team(other, "a") == ["apple 2"]
        await one.close()
        await other.close()


async def attempted(call: Awaitable[object]) -> None:
    with contextlib.suppress(RagCacheError):
        await call


async def until_done(call: Callable[[], Awaitable[object]]) -> None:
    """Repeat a call while it is refused."""

    async def is_done() -> bool:
        await call()
        return True

    await until_available(is_done)
