"""Searches rank by both legs, in stages, without duplicates."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core.errors import Unavailable
from ragcache_core.retrieval.fusion import Scores
from ragcache_retriever.ranking import hybrid
from ragcache_retriever.ranking.candidates import CandidatePool
from ragcache_retriever.ranking.hybrid import LEG_HITS, HybridRanking
from ragcache_retriever.ranking.rerankers import MAX_RERANKED, CandidateText
from ragcache_retriever.ranking.search import Search, SearchedChunks, SearchMode
from ragcache_retriever.search.vector_index import IndexStage, Vectors
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import Neighbourhood
from ragcache_retriever.store.sqlite.document_store import open_sqlite
from ragcache_retriever.store.sqlite.files.reserve import DiskReserve
from tests.kit.ranked_collection import (
    RankedCollection,
    StagesIndex,
    ranked_collection,
    unit,
)
from tests.kit.stored_documents import add_collection, put

TEXTS = (
    "the disk of the cache is full",
    "a memory tier holds hot values",
    "deletes reach every shard",
    "an unrelated page about bread",
)
VECTORS = (unit(1, 0, 0, 0), unit(0, 1, 0, 0), unit(0, 0, 1, 0), unit(0, 0, 0, 1))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DocumentStore]:
    store = open_sqlite(tmp_path, DiskReserve(tmp_path, 0))
    yield store
    store.database.close()


@pytest.fixture
def ranking() -> Iterator[HybridRanking]:
    ranking = HybridRanking()
    yield ranking
    ranking.close()


@pytest.fixture
def pages(store: DocumentStore) -> RankedCollection:
    return ranked_collection(store, TEXTS, VECTORS)


class ReversingReranker:
    """Prefers what the search likes least."""

    def __init__(self) -> None:
        self.num_calls = 0

    def scores(self, question: str, texts: Sequence[CandidateText]) -> Scores:
        self.num_calls += 1
        return np.arange(len(texts), dtype=np.float64)

    def close(self) -> None:
        pass


class SilentReranker(ReversingReranker):
    def scores(  # type: ignore[override]
        self, question: str, texts: Sequence[CandidateText]
    ) -> None:
        self.num_calls += 1


QUERY = unit(0.1, 1, 0.2, 0.3)


def test_both_legs_count(ranking: HybridRanking, pages: RankedCollection) -> None:
    *_, final = pages.search(ranking, "is the cache disk full?", QUERY, top_k=2)
    assert pages.indexes(final) == [1, 0]
    first, second = final.hits
    assert (first.legs.dense_rank, first.legs.lexical_rank) == (1, 0)
    assert (second.legs.dense_rank, second.legs.lexical_rank) == (4, 1)
    assert second.legs.dense == pytest.approx(float(VECTORS[0] @ QUERY))
    assert second.legs.lexical is not None
    assert 0 < second.score < first.score < 1


def test_a_mode_uses_one_leg_and_its_scores(
    ranking: HybridRanking, pages: RankedCollection
) -> None:
    question = "cache disk"
    *_, dense = pages.search(ranking, question, QUERY, mode=SearchMode.DENSE)
    assert pages.indexes(dense) == [1, 3, 2, 0]
    assert [one.score for one in dense.hits] == [one.legs.dense for one in dense.hits]
    *_, lexical = pages.search(ranking, question, QUERY, mode=SearchMode.LEXICAL)
    assert pages.indexes(lexical) == [0]
    assert lexical.hits[0].score == lexical.hits[0].legs.lexical


def test_without_a_vector_words_rank(ranking: HybridRanking, pages: RankedCollection) -> None:
    (only,) = pages.search(ranking, "shard values")
    assert sorted(pages.indexes(only)) == [1, 2]
    assert only.final
    assert only.final_probability == 1.0


@pytest.mark.parametrize(
    ("weight", "scores"), [(0.0, [1, 0.1]), (0.25, [0.75, 0.325]), (1.0, [0, 1])]
)
def test_the_weight_is_the_share_of_the_lexical_score(
    ranking: HybridRanking, pages: RankedCollection, weight: float, scores: list[float]
) -> None:
    *_, final = pages.search(ranking, "cache disk", QUERY, lexical_weight=weight)
    found = {pages.rows.index(one.row): one.score for one in final.hits}
    legs = {pages.rows.index(one.row): one.legs for one in final.hits}
    # Page 1 has the nearest embedding and none of the words, page 0 has all of them.
    assert (found.get(1, 0), found[0]) == pytest.approx(tuple(scores))
    assert (legs[0].lexical is None) == (weight == 0.0)


def test_a_weight_of_one_leg_counts_unless_the_caller_wants_both_legs(
    ranking: HybridRanking, pages: RankedCollection
) -> None:
    question = "cache disk"
    *_, auto = pages.search(ranking, question, QUERY, lexical_weight=0.0)
    assert pages.indexes(auto) == [1, 3, 2, 0]
    *_, both = pages.search(ranking, question, QUERY, lexical_weight=0.0, mode=SearchMode.HYBRID)
    assert pages.indexes(both)[:2] == [1, 0]


def test_a_least_score_leaves_hits_out(ranking: HybridRanking, pages: RankedCollection) -> None:
    *_, final = pages.search(ranking, "-", QUERY, mode=SearchMode.DENSE, min_score=0.25)
    assert pages.indexes(final) == [1, 3]


def test_copies_are_named_by_the_newest(ranking: HybridRanking, store: DocumentStore) -> None:
    page = " ".join(f"word{i}" for i in range(60))
    vectors = [unit(1, 0, 0, 0.1), unit(1, 0, 0, 0), unit(0, 1, 0, 0)]
    pages = ranked_collection(store, [page, page.replace(" ", "\n"), "another text"], vectors)
    *_, final = pages.search(ranking, "word3 text", unit(1, 0.1, 0, 0))
    assert pages.indexes(final) == [1, 2]
    assert final.hits[0].duplicates == (pages.rows[0],)


def test_documents_of_one_form_are_no_copies(ranking: HybridRanking, store: DocumentStore) -> None:
    texts = [
        f"Supply contract of plant {name}. The pump is serviced every {weeks} weeks. Each party"
        " keeps one signed copy, and each change needs both signatures."
        for name, weeks in (("North", 6), ("South", 9), ("North", 8))
    ]
    pages = ranked_collection(store, texts, [ALONG] * len(texts))
    *_, final = pages.search(ranking, "How often is the pump of plant South serviced?", ALONG)
    assert pages.indexes(final) == [1, 0, 2]
    assert [one.duplicates for one in final.hits] == [(), (), ()]


@pytest.mark.parametrize(
    ("titles", "rest", "found"),
    [
        (("Contract of plant North", "Contract of plant South"), ("", ""), 2),
        (("Contract", "Contract"), ("North", "South"), 1),
        (("d0", "d1"), ("North", "South"), 2),
        (("d0", "d1"), ("\tNorth", "North "), 1),
    ],
    ids=["other titles", "one title", "other documents without a title", "copies without a title"],
)
def test_one_clause_of_two_documents_is_found_once_if_they_have_one_name(
    ranking: HybridRanking,
    store: DocumentStore,
    titles: tuple[str, str],
    rest: tuple[str, str],
    found: int,
) -> None:
    add_collection(store, "c")
    clause = "Each party keeps one signed copy."
    rows = [
        put(store, f"d{i}", [clause, rest[i]], title=titles[i]).indexes[0].added for i in range(2)
    ]
    generation = store.collections.all()["c"].serving
    assert generation is not None
    chunks = SearchedChunks(store, generation.row, None, lexical_weight=1.0)
    *_, final = ranking.stages(Search("c", "who keeps a signed copy?", 5), chunks)
    assert len(final.hits) == found
    assert {one.row for one in final.hits} <= {some[0] for some in rows}


def test_equal_scores_are_in_the_order_of_the_documents(
    ranking: HybridRanking, store: DocumentStore
) -> None:
    generation = add_collection(store, "c")
    for name in "cabd":
        put(store, name, [f"lease of hall {name}", "no"], title="Lease")
    chunks = SearchedChunks(store, generation, None, lexical_weight=1.0)
    *_, final = ranking.stages(Search("c", "lease of a hall", 4), chunks)
    positions = store.reads.positions([one.row for one in final.hits])
    assert [positions[one.row] for one in final.hits] == [(name, 0) for name in "abcd"]


def test_chunks_with_the_identifier_come_first(
    ranking: HybridRanking, store: DocumentStore
) -> None:
    texts = [
        "Release 2.11.3 of the agent: how to install and start the agent, step by step",
        "Notes for 3.11.2",
        "The agent: how to install and start the agent",
    ]
    vectors = [unit(1, 0, 0, 0), unit(0, 0, 0, 1), unit(1, 0.1, 0, 0)]
    pages = ranked_collection(store, texts, vectors)
    question = "How do I install and start agent 3.11.2?"
    for mode in (SearchMode.AUTO, SearchMode.HYBRID, SearchMode.LEXICAL):
        *_, final = pages.search(ranking, question, ALONG, mode=mode)
        assert pages.indexes(final)[0] == 1
        scores = [one.score for one in final.hits]
        assert scores == sorted(scores, reverse=True)
        assert final.hits[0].legs.lexical is not None


def test_the_lexical_leg_does_not_cut_between_equal_hits(
    ranking: HybridRanking, store: DocumentStore
) -> None:
    num_leases = LEG_HITS + 30
    texts = [f"lease of hall x{i:03}" for i in range(num_leases)] + ["bread"] * (num_leases + 1)
    angles = [i / num_leases for i in range(num_leases)]
    vectors = [unit(np.cos(angle), np.sin(angle), 0, 0) for angle in angles]
    vectors += [unit(0, 0, 1, 0)] * (num_leases + 1)
    pages = ranked_collection(store, texts, vectors)
    *_, final = pages.search(ranking, "lease", vectors[num_leases - 1], top_k=3)
    assert pages.indexes(final) == [num_leases - 1, num_leases - 2, num_leases - 3]


def test_diversity_takes_another_topic(ranking: HybridRanking, store: DocumentStore) -> None:
    vectors = [unit(1, 0, 0, 0), unit(1, 0.05, 0, 0), unit(0.6, 0, 1, 0)]
    pages = ranked_collection(store, ["one alpha", "two beta", "three gamma"], vectors)
    query = unit(1, 0, 0, 0)
    *_, similar = pages.search(ranking, "-", query, top_k=2)
    assert pages.indexes(similar) == [0, 1]
    *_, diverse = pages.search(ranking, "-", query, top_k=2, diversity=0.8)
    assert pages.indexes(diverse) == [0, 2]


def test_stages_become_trusted_when_they_prove_final(
    ranking: HybridRanking, pages: RankedCollection
) -> None:
    hits = [(row, 0.9 - i / 10) for i, row in enumerate(pages.rows)]
    index = StagesIndex([hits[:2], hits])
    first = pages.search(ranking, "-", QUERY, index, top_k=2)
    assert [stage.final for stage in first] == [False, True]
    assert first[0].final_probability == pytest.approx(0.5)
    for _ in range(50):
        pages.search(ranking, "-", QUERY, index, top_k=2)
    last = pages.search(ranking, "-", QUERY, index, top_k=2)
    assert last[0].final_probability > 0.9
    assert last[-1].final_probability == 1.0


def test_what_stages_proved_belongs_to_one_collection(
    ranking: HybridRanking, pages: RankedCollection, store: DocumentStore
) -> None:
    others = ranked_collection(store, TEXTS, VECTORS, name="others")
    found = []
    for collection in (pages, others):
        hits = [(row, 0.9 - i / 10) for i, row in enumerate(collection.rows)]
        index = StagesIndex([hits[:2], hits])
        for _ in range(9):
            first_stage, _ = collection.search(ranking, "-", QUERY, index, top_k=2)
            found.append(first_stage.final_probability)
    assert found[9:] == found[:9] == sorted(found[:9])
    assert found[0] == 0.5 < found[8]


def test_a_reranker_orders_the_final_stage(pages: RankedCollection) -> None:
    hits = [(row, 0.9 - i / 10) for i, row in enumerate(pages.rows)]
    index = StagesIndex([hits[:3], hits[:3]])
    reranker = ReversingReranker()
    ranking = HybridRanking(reranker)
    first, before, final = pages.search(ranking, "-", QUERY, index)
    assert pages.indexes(first) == pages.indexes(before) == [0, 1, 2]
    assert first.progress < before.progress < final.progress == 1.0
    assert [one.final for one in (first, before, final)] == [False, False, True]
    assert pages.indexes(final) == [2, 1, 0]
    assert [one.legs.reranked for one in final.hits] == [2.0, 1.0, 0.0]
    assert reranker.num_calls == 1
    ranking.close()


def test_the_hits_before_the_reranker_are_a_stage_while_it_reads(pages: RankedCollection) -> None:
    reranker = ReversingReranker()
    ranking = HybridRanking(reranker)
    index: Any = pages.exact_index(QUERY)
    chunks = SearchedChunks(pages.store, pages.generation, index, lexical_weight=0.4)
    stages = ranking.stages(Search("c", "cache disk", 2, vector=QUERY), chunks)
    before = next(stages)
    assert (before.final, reranker.num_calls) == (False, 0)
    assert next(stages).final
    assert reranker.num_calls == 1
    ranking.close()


def test_a_reranker_without_an_answer_leaves_the_order(pages: RankedCollection) -> None:
    ranking = HybridRanking(SilentReranker())
    *_, final = pages.search(ranking, "cache disk", QUERY, top_k=2)
    assert pages.indexes(final) == [1, 0]
    assert final.hits[0].legs.reranked is None
    ranking.close()


def test_one_leg_alone_is_not_reranked(pages: RankedCollection) -> None:
    reranker = ReversingReranker()
    ranking = HybridRanking(reranker)
    pages.search(ranking, "cache", QUERY, mode=SearchMode.DENSE)
    pages.search(ranking, "cache", QUERY, mode=SearchMode.LEXICAL)
    assert reranker.num_calls == 0
    ranking.close()


def test_the_dense_leg_ranks_alone_if_words_fail(
    ranking: HybridRanking, pages: RankedCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Unavailable("documents", "the disk does not answer")

    monkeypatch.setattr(pages.store.lexical, "hits", fail)
    *_, final = pages.search(ranking, "cache disk", QUERY)
    assert pages.indexes(final) == [1, 3, 2, 0]
    with pytest.raises(Unavailable):
        pages.search(ranking, "cache disk", QUERY, mode=SearchMode.LEXICAL)


def test_early_stages_do_not_wait_for_slow_words(
    ranking: HybridRanking, pages: RankedCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    released = threading.Event()

    def slow(*_: object, **__: object) -> list[object]:
        released.wait(600)
        return []

    monkeypatch.setattr(pages.store.lexical, "hits", slow)
    monkeypatch.setattr(hybrid, "LEXICAL_DEADLINE_S", 0.05)
    hits = [(row, 0.9 - i / 10) for i, row in enumerate(pages.rows)]
    stages = pages.search(ranking, "cache", QUERY, StagesIndex([hits, hits]))
    released.set()
    assert [stage.final for stage in stages] == [True]
    assert pages.indexes(stages[0]) == [0, 1, 2, 3]


NUM_PAGES, NUM_VERSIONS = 30, 4


def versioned_pages(store: DocumentStore, num_pages: int, num_versions: int) -> RankedCollection:
    """Pages whose versions differ by white space. Earlier pages are nearer to ``ALONG``."""
    texts, vectors = [], []
    for page in range(num_pages):
        for version in range(num_versions):
            words = [f"p{page}w{i}" for i in range(40)]
            texts.append(" ".join(words) + " " * version)
            angle = (page + version / 100) / num_pages
            vectors.append(unit(np.cos(angle), np.sin(angle), 0, 0))
    return ranked_collection(store, texts, vectors)


ALONG = unit(1, 0, 0, 0)


class CountingIndex(StagesIndex):
    """An index that remembers how many hits searches have asked for."""

    def __init__(self, exact: StagesIndex) -> None:
        super().__init__(exact.stages)
        self.asked: list[int] = []

    def search(self, query: Vectors, top_k: int, **options: object) -> Iterator[IndexStage]:
        self.asked.append(top_k)
        yield from super().search(query, top_k, **options)


@pytest.mark.parametrize("top_k", [5, 10, 20, 30, 50])
def test_copies_displace_no_other_hits(
    ranking: HybridRanking, store: DocumentStore, top_k: int
) -> None:
    pages = versioned_pages(store, NUM_PAGES, NUM_VERSIONS)
    *_, final = pages.search(ranking, "-", ALONG, top_k=top_k)
    found = [i // NUM_VERSIONS for i in pages.indexes(final)]
    assert found == list(range(min(top_k, NUM_PAGES)))
    newest = [i % NUM_VERSIONS for i in pages.indexes(final)]
    assert newest == [NUM_VERSIONS - 1] * len(found)


@pytest.mark.parametrize(
    ("num_pages", "num_versions", "options", "found", "asked"),
    [
        pytest.param(12, 30, {"top_k": 3}, 3, [LEG_HITS], id="enough"),
        pytest.param(12, 30, {"top_k": 10}, 10, [LEG_HITS, 4 * LEG_HITS], id="more"),
        pytest.param(
            12, 30, {"top_k": 20}, 12, [LEG_HITS, 4 * LEG_HITS], id="no more in the index"
        ),
        pytest.param(12, 30, {"top_k": 10, "min_score": 0.99}, 2, [LEG_HITS], id="a least score"),
        pytest.param(2, 240, {"top_k": 5}, 2, [LEG_HITS, 4 * LEG_HITS, 450], id="a bound"),
    ],
)
def test_the_legs_are_asked_for_more_until_there_are_enough_hits(
    ranking: HybridRanking,
    store: DocumentStore,
    monkeypatch: pytest.MonkeyPatch,
    num_pages: int,
    num_versions: int,
    options: dict[str, Any],
    found: int,
    asked: list[int],
) -> None:
    monkeypatch.setattr(hybrid, "MAX_LEG_HITS", 450)
    pages = versioned_pages(store, num_pages, num_versions)
    index = CountingIndex(pages.exact_index(ALONG))
    *_, final = pages.search(ranking, "-", ALONG, index, mode=SearchMode.DENSE, **options)
    assert [i // num_versions for i in pages.indexes(final)] == list(range(found))
    assert index.asked == asked


def test_words_alone_are_searched_for_more(ranking: HybridRanking, store: DocumentStore) -> None:
    texts = [
        f"apple p{i // 40} " + " ".join(f"p{i // 40}w{j}" for j in range(40)) for i in range(160)
    ]
    pages = ranked_collection(store, texts, [ALONG] * len(texts))
    (only,) = pages.search(ranking, "apple", top_k=4)
    assert sorted(i // 40 for i in pages.indexes(only)) == [0, 1, 2, 3]


def test_searches_without_copies_read_no_more_texts(
    ranking: HybridRanking, store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = versioned_pages(store, 150, 1)
    index = CountingIndex(pages.exact_index(ALONG))
    read: list[int] = []
    neighbourhoods = store.reads.neighbourhoods

    def counted(rows: Sequence[int], window: int) -> dict[int, Neighbourhood]:
        read.extend(rows)
        return neighbourhoods(rows, window)

    monkeypatch.setattr(store.reads, "neighbourhoods", counted)
    *_, final = pages.search(ranking, "-", ALONG, index, top_k=10)
    assert pages.indexes(final) == list(range(10))
    assert len(read) == 10 + 5 + 8
    assert index.asked == [LEG_HITS]


def test_hits_that_were_not_reranked_follow_the_others(store: DocumentStore) -> None:
    pages = versioned_pages(store, 70, 1)
    reranker = ReversingReranker()
    ranking = HybridRanking(reranker)
    *_, final = pages.search(ranking, "-", ALONG, top_k=60)
    assert pages.indexes(final) == [*reversed(range(MAX_RERANKED)), *range(MAX_RERANKED, 60)]
    scores = [one.score for one in final.hits]
    assert scores == sorted(scores, reverse=True)
    assert [one.legs.reranked is None for one in final.hits] == [False] * 50 + [True] * 10
    # Their score is not known, so they pass no least score.
    *_, final = pages.search(ranking, "-", ALONG, top_k=60, min_score=-1.0)
    assert len(final.hits) == MAX_RERANKED
    ranking.close()


def test_further_hits_are_not_reranked(store: DocumentStore) -> None:
    pages = versioned_pages(store, 12, 30)
    reranker = ReversingReranker()
    ranking = HybridRanking(reranker)
    *_, final = pages.search(ranking, "-", ALONG, top_k=10)
    assert [i // 30 for i in pages.indexes(final)] == [1, 0, *range(2, 10)]
    assert reranker.num_calls == 1
    ranking.close()


def test_chunks_with_the_identifier_keep_their_order_after_a_page_that_is_best_in_both_legs(
    ranking: HybridRanking, store: DocumentStore
) -> None:
    texts = [
        "install, start, monitor, update, remove the agent",
        "Notes for 3.11.2 of many other things and of bread",
        "start agent 3.11.2",
        *(f"bread {i}" for i in range(30)),
    ]
    vectors = [ALONG, unit(0.1, 1, 0, 0), unit(1, 0.5, 0, 0), *[unit(0, 0, 1, 0)] * 30]
    pages = ranked_collection(store, texts, vectors)
    question = "How do I install, start, monitor, update and remove the agent 3.11.2?"
    *_, final = pages.search(ranking, question, ALONG, top_k=3)
    assert pages.indexes(final) == [2, 1, 0]


def test_the_nearest_of_many_chunks_with_the_identifier_is_found(
    ranking: HybridRanking, store: DocumentStore
) -> None:
    num_pages = LEG_HITS + 4
    texts = [f"config.yaml part {'filler ' * i}" for i in range(num_pages)]
    texts += ["bread"] * (num_pages + 1)
    vectors = [unit(0, 1, 0, 0)] * (num_pages - 1) + [ALONG]
    vectors += [unit(0, 0, 1, 0)] * (num_pages + 1)
    pages = ranked_collection(store, texts, vectors)
    *_, final = pages.search(ranking, "config.yaml", ALONG, top_k=3)
    assert pages.indexes(final)[0] == num_pages - 1


def test_the_lexical_leg_asks_the_database_once(
    ranking: HybridRanking, store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"lease x{i:03}" for i in range(LEG_HITS + 30)]
    pages = ranked_collection(store, texts, [ALONG] * len(texts))
    asked: list[int] = []
    hits = store.lexical.hits

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append(args[2])
        return hits(*args, **kwargs)

    monkeypatch.setattr(store.lexical, "hits", counted)
    *_, final = pages.search(ranking, "lease", top_k=3)
    assert len(final.hits) == 3
    assert len(asked) == 1


def test_a_long_document_is_remembered_by_a_digest(store: DocumentStore) -> None:
    pages = ranked_collection(store, ["lease " * 10_000], [ALONG])
    [row] = pages.rows
    chunks = SearchedChunks(store, pages.generation, None, lexical_weight=1.0)
    pool = CandidatePool(chunks, 0)
    pool.read([row])
    assert sys.getsizeof(pool.document_name(row)) < 200
