"""The segmented index against plain searches of the same rows."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search import segmented_index
from ragcache_retriever.search.cell_base import Probing
from ragcache_retriever.search.cell_build import BuildOptions, build_cell_base
from ragcache_retriever.search.files.spool import SpooledSource
from ragcache_retriever.search.files.stored_vectors import Precision
from ragcache_retriever.search.scan_pool import IndexThreads
from ragcache_retriever.search.segmented_index import IndexOptions, SegmentedIndex
from tests.kit.vectors import (
    DIMENSION,
    EVERYTHING,
    NONE,
    add,
    clustered,
    final,
    nearest,
    running_threads,
    wait_until_built,
)

CELL_KINDS = (IndexKind.FLAT, IndexKind.IVF)


@pytest.fixture(scope="module")
def threads() -> Iterator[IndexThreads]:
    with running_threads() as started:
        yield started


def opened(
    threads: IndexThreads,
    kind: IndexKind = IndexKind.AUTO,
    folder: Path | None = None,
    probing: Probing = EVERYTHING,
    precision: Precision = "float32",
) -> SegmentedIndex:
    options = IndexOptions(kind=kind, probing=probing, precision=precision)
    return SegmentedIndex.open(folder, DIMENSION, options, threads)


@pytest.mark.parametrize("kind", CELL_KINDS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 1000])
@pytest.mark.parametrize("top_k", [1, 10, 1000])
def test_the_final_stage_over_all_cells_is_exact(
    threads: IndexThreads, kind: IndexKind, count: int, top_k: int
) -> None:
    vectors, rows = clustered(count, seed=1), np.arange(count) * 3 + 7
    index = opened(threads, kind)
    index.load([(rows, vectors)])
    for query in clustered(5, seed=2):
        assert final(index, query, top_k).rows == nearest(rows, vectors, query, top_k)


def test_the_final_stage_equals_a_plain_search_of_faiss_with_the_same_nprobe(
    threads: IndexThreads,
) -> None:
    vectors, rows = clustered(5000, seed=3), np.arange(5000)
    source = SpooledSource(rows, vectors)
    base = build_cell_base(source, DIMENSION, BuildOptions(IndexKind.IVF))
    probing = Probing(exact_limit=600, min_share=1 / 16)
    index = SegmentedIndex(
        None, DIMENSION, IndexOptions(IndexKind.IVF, probing=probing), threads, base
    )
    quantizer = faiss.IndexFlatIP(DIMENSION)
    quantizer.add(base.centroids)
    plain = faiss.IndexIVFFlat(
        quantizer, DIMENSION, len(base.centroids), faiss.METRIC_INNER_PRODUCT
    )
    plain.is_trained = True
    plain.add(vectors)
    for query in clustered(50, seed=4):
        plan = base.plan(query, probing)
        plain.nprobe = len(plan.cells)
        scores, found = plain.search(query[None], 10)
        stage = final(index, query, 10)
        assert stage.rows == tuple(found[0].tolist())
        assert stage.scores == pytest.approx(scores[0], abs=1e-5)
        assert stage.num_scored == plan.total < 5000


def test_equal_scores_are_ordered_by_row_in_base_and_tail(threads: IndexThreads) -> None:
    copies = np.repeat(clustered(1, seed=5), 40, axis=0)
    rows = np.random.default_rng(5).permutation(40)
    index = opened(threads, IndexKind.FLAT)
    index.load([(rows[:20], copies[:20])])
    add(index, rows[20:].tolist(), copies[20:])
    assert final(index, copies[0], 12).rows == tuple(range(12))


@settings(deadline=None, max_examples=40)
@given(data=st.data(), kind=st.sampled_from(CELL_KINDS))
def test_any_sequence_of_changes_equals_a_plain_search(
    data: st.DataObject, kind: IndexKind
) -> None:
    pool = clustered(300, seed=6)
    live: dict[int, int] = {}  # row -> vector
    with running_threads(1) as threads:
        index = opened(threads, kind, probing=EVERYTHING)
        fresh = itertools.count()
        for _ in range(data.draw(st.integers(1, 6))):
            gone = data.draw(st.lists(st.sampled_from(sorted(live)), unique=True)) if live else []
            new = [next(fresh) % 300 for _ in range(data.draw(st.integers(0, 60)))]
            new = [row for row in dict.fromkeys(new) if row not in live or row in gone]
            picked = [data.draw(st.integers(0, 299)) for _ in new]
            index.apply([*gone, 10_000], new, pool[picked] if new else NONE)
            for row in gone:
                del live[row]
            live.update(zip(new, picked, strict=True))
            if data.draw(st.booleans()):
                index.load([(index.rows(), pool[[live[int(row)] for row in index.rows()]])])
            rows = np.array(sorted(live), np.int64)
            assert index.rows().tolist() == rows.tolist()
            assert len(index) == len(live)
            vectors = pool[[live[int(row)] for row in rows]] if live else NONE
            allowed = np.array([row for row in rows if data.draw(st.booleans())], np.int64)
            is_allowed = np.isin(rows, allowed)
            query = pool[data.draw(st.integers(0, 299))]
            assert final(index, query, 7).rows == nearest(rows, vectors, query, 7)
            expected = nearest(rows[is_allowed], vectors[is_allowed], query, 7)
            assert final(index, query, 7, allowed).rows == expected
        index.close()


@pytest.mark.parametrize("kind", CELL_KINDS)
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_a_filter_holds_whether_few_or_many_rows_are_allowed(
    threads: IndexThreads, monkeypatch: pytest.MonkeyPatch, kind: IndexKind, share: float
) -> None:
    monkeypatch.setattr(segmented_index, "FEW_ALLOWED", 100)
    vectors, rows = clustered(4000, seed=7), np.arange(4000)
    index = opened(threads, kind)
    index.load([(rows[:3000], vectors[:3000])])
    add(index, rows[3000:].tolist(), vectors[3000:])
    mask = np.random.default_rng(7).random(4000) < share
    allowed = np.append(rows[mask], 9999)  # one row is in no index
    for query in clustered(10, seed=8):
        expected = nearest(rows[mask], vectors[mask], query, 10)
        assert final(index, query, 10, allowed).rows == expected


def test_a_filter_far_from_the_query_still_fills_the_hits(
    threads: IndexThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segmented_index, "FEW_ALLOWED", 100)
    vectors, rows = clustered(8000, seed=9), np.arange(8000)
    query = vectors[0]
    far = np.sort(np.argsort(vectors @ query)[:400])
    index = opened(threads, IndexKind.IVF, probing=Probing(exact_limit=100, min_share=1 / 16))
    index.load([(rows, vectors)])
    assert set(final(index, query, 10, far).rows) <= set(far.tolist())
    assert len(final(index, query, 10, far).rows) == 10


def test_stages_advance_to_the_end_and_count_what_they_score(threads: IndexThreads) -> None:
    vectors = clustered(6000, seed=10)
    index = opened(threads, IndexKind.IVF)
    index.load([(np.arange(6000), vectors)])
    for query in clustered(10, seed=11):
        stages = list(index.search(query, 10))
        assert 2 <= len(stages) <= 4
        assert stages[-1].progress == 1
        assert stages[-1].final_probability == 1
        assert stages[-1].num_scored == 6000
        for before, after in itertools.pairwise(stages):
            assert before.progress < after.progress
            assert before.num_scored < after.num_scored
            assert before.scores <= after.scores
        assert all(0 <= stage.final_probability <= 1 for stage in stages)


def test_a_stage_that_says_it_is_surely_final_is(threads: IndexThreads) -> None:
    rng = np.random.default_rng(12)
    centres = np.eye(DIMENSION)[rng.integers(0, DIMENSION, 4000)]
    noise = 0.02 * rng.normal(size=(4000, DIMENSION))
    vectors = ((centres + noise) / np.linalg.norm(centres + noise, axis=1, keepdims=True)).astype(
        np.float32
    )
    index = opened(threads, IndexKind.IVF)
    index.load([(np.arange(4000), vectors)])
    num_sure = 0
    for query in vectors[:40]:
        stages = list(index.search(query, 10))
        for stage in stages[:-1]:
            if stage.final_probability == 1:
                num_sure += 1
                assert stage.rows == stages[-1].rows
    assert num_sure, "no stage was provably final, although the clusters are far apart"


@pytest.mark.parametrize("kind", CELL_KINDS)
def test_a_cancelled_search_ends_without_a_final_stage(
    threads: IndexThreads, kind: IndexKind
) -> None:
    vectors = clustered(30_000, seed=13)
    index = opened(threads, kind)
    index.load([(np.arange(30_000), vectors)])
    asked = itertools.count()
    stages = list(index.search(vectors[0], 10, cancelled=lambda: next(asked) > 2))
    assert not any(stage.final for stage in stages)
    assert next(asked) <= 5, "the search went on"
    few = np.arange(3000)
    assert not list(index.search(vectors[0], 10, allowed=few, cancelled=lambda: True))


def test_changes_are_seen_by_later_searches_only(threads: IndexThreads) -> None:
    vectors = clustered(5000, seed=14)
    index = opened(threads, IndexKind.IVF)
    index.load([(np.arange(5000), vectors)])
    query = vectors[17]
    before = index.search(query, 5)
    first = next(before)  # its view is taken now
    index.apply([17], [6000], vectors[17:18])
    assert [first, *before][-1].rows[0] == 17
    assert final(index, query, 5).rows[0] == 6000


@pytest.mark.parametrize("precision", ["float32", "sq8"])
def test_merges_while_searches_and_changes_go_on(
    threads: IndexThreads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: Precision
) -> None:
    monkeypatch.setattr(segmented_index, "MIN_TAIL", 200)
    monkeypatch.setattr(segmented_index, "FLAT_LIMIT", 1000)
    vectors = clustered(6000, seed=15)
    index = opened(threads, folder=tmp_path / "index", precision=precision)
    removed: set[int] = set()
    problems: list[str] = []
    stop = threading.Event()

    def search() -> None:
        while not stop.is_set():
            for query in vectors[::601]:
                gone = set(removed)
                hits = set(final(index, query, 10).rows)
                if hits & gone:
                    problems.append(f"{hits & gone} were removed before the search")

    searching = [threading.Thread(target=search) for _ in range(3)]
    for thread in searching:
        thread.start()
    for begin in range(0, 6000, 50):
        add(index, range(begin, begin + 50), vectors[begin : begin + 50])
        index.apply(range(begin, begin + 5), (), NONE)
        removed.update(range(begin, begin + 5))
    wait_until_built(index)
    stop.set()
    for thread in searching:
        thread.join()
    assert not problems
    assert index.kind is IndexKind.IVF
    rows = np.array([row for row in range(6000) if row % 50 >= 5])
    assert index.rows().tolist() == rows.tolist()
    found = [set(final(index, query, 10).rows) for query in vectors[3::600]]
    plain = [set(nearest(rows, vectors[rows], query, 10)) for query in vectors[3::600]]
    recall = sum(len(a & b) for a, b in zip(found, plain, strict=True)) / (10 * len(found))
    assert recall == 1 if precision == "float32" else recall >= 0.9
    index.close()


def test_a_merge_that_fails_leaves_the_index_as_it_was(
    threads: IndexThreads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(segmented_index, "MIN_TAIL", 50)
    vectors = clustered(900, seed=16)
    index = opened(threads, folder=tmp_path / "index")
    index.load([(np.arange(100), vectors[:100])])
    (tmp_path / "index").rename(tmp_path / "moved")
    (tmp_path / "index").write_text("a file where the folder was")
    add(index, range(100, 200), vectors[100:200])
    wait_until_built(index)
    assert final(index, vectors[150], 5).rows == nearest(
        np.arange(200), vectors[:200], vectors[150], 5
    )
    (tmp_path / "index").unlink()
    add(index, range(200, 900), vectors[200:])
    wait_until_built(index)
    index.close()
    again = opened(threads, folder=tmp_path / "index")
    assert again.rows().tolist() == list(range(900))
    again.close()


def test_the_kind_changes_in_the_background(threads: IndexThreads) -> None:
    vectors = clustered(3000, seed=17)
    index = opened(threads)
    index.load([(np.arange(3000), vectors)])
    assert index.kind is IndexKind.FLAT
    index.set_kind(IndexKind.IVF)
    wait_until_built(index)
    assert index.kind is IndexKind.IVF
    assert final(index, vectors[5], 9).rows == nearest(np.arange(3000), vectors, vectors[5], 9)
    index.set_kind(IndexKind.AUTO)
    wait_until_built(index)
    assert index.kind is IndexKind.FLAT


def test_a_reopened_index_has_the_rows_of_its_last_base(
    threads: IndexThreads, tmp_path: Path
) -> None:
    vectors = clustered(3000, seed=18)
    index = opened(threads, IndexKind.IVF, tmp_path)
    index.load([(np.arange(2000), vectors[:2000])])
    add(index, range(2000, 2010), vectors[2000:2010])
    hits = final(index, vectors[9], 5)
    index.close()
    again = opened(threads, IndexKind.IVF, tmp_path)
    assert again.rows().tolist() == list(range(2000)), "the owner adds the tail again"
    assert again.kind is IndexKind.IVF
    assert final(again, vectors[9], 5).rows == hits.rows
    again.close()


def test_a_reopened_index_takes_on_another_kind(threads: IndexThreads, tmp_path: Path) -> None:
    vectors = clustered(3000, seed=20)
    index = opened(threads, IndexKind.IVF, tmp_path)
    index.load([(np.arange(3000), vectors)])
    index.close()
    again = opened(threads, IndexKind.FLAT, tmp_path)
    wait_until_built(again)
    assert again.kind is IndexKind.FLAT
    assert again.rows().tolist() == list(range(3000))
    again.close()


def test_an_index_of_another_precision_opens_empty(threads: IndexThreads, tmp_path: Path) -> None:
    index = opened(threads, folder=tmp_path, precision="sq8")
    index.load([(np.arange(50), clustered(50, seed=21))])
    index.close()
    assert len(opened(threads, folder=tmp_path)) == 0, "exact vectors cannot be made from codes"


def test_quantized_vectors_keep_their_codes_through_merges(
    threads: IndexThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segmented_index, "MIN_TAIL", 50)
    vectors = clustered(3000, seed=19)
    index = opened(threads, IndexKind.IVF, precision="sq8")
    index.load([(np.arange(2000), vectors[:2000])])
    before = dict(zip(*_hits(index, vectors[7]), strict=True))
    for begin in (2000, 2300, 2600):
        add(index, range(begin, begin + 300), vectors[begin : begin + 300])
        wait_until_built(index)
    after = dict(zip(*_hits(index, vectors[7]), strict=True))
    assert len(after) == 2900
    assert {row: after[row] for row in range(2000)} == before


def _hits(index: SegmentedIndex, query: np.ndarray) -> tuple[tuple[int, ...], tuple[float, ...]]:
    stage = final(index, query, 3000)
    return stage.rows, stage.scores
