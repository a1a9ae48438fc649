"""The embedded index against plain searches of the same rows."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search import faiss_base, faiss_files, faiss_index
from ragcache_retriever.search.faiss_base import Precision, SearchEffort
from ragcache_retriever.search.faiss_build import build_base
from ragcache_retriever.search.faiss_index import BuildThread, FaissIndex, IndexOptions
from tests.kit.clock import ManualClock
from tests.kit.vectors import (
    DIMENSION,
    EVERYTHING,
    NONE,
    add,
    clustered,
    final,
    nearest,
    wait_until_built,
)

FAISS: Any = faiss  # its types leave out much of what Python can call
CELL_KINDS = (IndexKind.FLAT, IndexKind.IVF)
KINDS = (*CELL_KINDS, IndexKind.HNSW)


@pytest.fixture(scope="module")
def builds() -> Iterator[BuildThread]:
    with BuildThread() as started:
        yield started


def opened(
    builds: BuildThread,
    kind: IndexKind = IndexKind.AUTO,
    folder: Path | None = None,
    effort: SearchEffort = EVERYTHING,
    precision: Precision = "float32",
) -> FaissIndex:
    options = IndexOptions(kind=kind, effort=effort, precision=precision)
    return FaissIndex.open(folder, DIMENSION, options, builds)


def loaded(
    builds: BuildThread,
    kind: IndexKind,
    vectors: np.ndarray,
    effort: SearchEffort = EVERYTHING,
    precision: Precision = "float32",
) -> FaissIndex:
    """An index of the kind, with the vectors in rows from 0."""
    index = opened(builds, kind, None, effort, precision)
    index.load([(np.arange(len(vectors)), vectors)])
    wait_until_built(index)
    return index


def recall(index: FaissIndex, rows: np.ndarray, vectors: np.ndarray) -> float:
    """Share of the hits of plain searches among the rows that the index finds."""
    queries = clustered(40, seed=2)
    found = [set(final(index, query, 10, rows).rows) for query in queries]
    plain = [set(nearest(rows, vectors[rows], query, 10)) for query in queries]
    return sum(len(a & b) for a, b in zip(found, plain, strict=True)) / (10 * len(queries))


@pytest.mark.parametrize("kind", CELL_KINDS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 1000])
@pytest.mark.parametrize("top_k", [1, 10, 1000])
def test_the_final_stage_over_all_cells_is_exact(
    builds: BuildThread, kind: IndexKind, count: int, top_k: int
) -> None:
    vectors, rows = clustered(count, seed=1), np.arange(count) * 3 + 7
    index = opened(builds, kind)
    order = np.random.default_rng(1).permutation(count)
    index.load([(rows[order], vectors[order])])
    for query in clustered(5, seed=2):
        assert final(index, query, top_k).rows == nearest(rows, vectors, query, top_k)


@settings(deadline=None, max_examples=25)
@given(
    count=st.integers(1, 3000),
    top_k=st.integers(1, 30),
    limit=st.integers(1, 2000),
    precision=st.sampled_from(["float32", "sq8"]),
)
def test_the_final_stage_of_cells_equals_a_plain_search_with_the_same_nprobe(
    count: int, top_k: int, limit: int, precision: Precision
) -> None:
    vectors = clustered(count, seed=3)
    effort = SearchEffort(exact_limit=limit, min_share=1 / 16)
    with BuildThread() as builds:
        index = loaded(builds, IndexKind.IVF, vectors, effort, precision)
        for query in clustered(10, seed=4):
            cells, scanned = index.base.planned_cells(query, effort)
            ranked = index.base.index.quantizer.search(query[None], index.base.index.nlist)[1][0]
            nprobe = int(np.flatnonzero(ranked == cells[-1])[0]) + 1
            parameters = FAISS.SearchParametersIVF(nprobe=nprobe)
            scores, found = index.base.index.search(query[None], top_k, params=parameters)
            stage = final(index, query, top_k)
            is_hit = found[0] >= 0
            assert dict(zip(stage.rows, stage.scores, strict=True)) == dict(
                zip(found[0][is_hit].tolist(), scores[0][is_hit].tolist(), strict=True)
            )
            assert stage.num_scored == scanned[-1] <= count


@pytest.mark.parametrize("precision", ["float32", "sq8"])
def test_the_final_stage_of_a_graph_equals_a_plain_search_with_the_same_beam(
    builds: BuildThread, precision: Precision
) -> None:
    index = loaded(builds, IndexKind.HNSW, clustered(3000, seed=5), SearchEffort(), precision)
    assert index.kind is IndexKind.HNSW
    for query in clustered(20, seed=6):
        *early, last = index.search(query, 10)
        assert [stage.progress for stage in early] in ([], [pytest.approx(1 / 8)])
        parameters = FAISS.SearchParametersHNSW(efSearch=SearchEffort().beam)
        plain = index.base.index.search(query[None], 10, params=parameters)[1][0]
        assert set(last.rows) == set(plain.tolist())


@settings(deadline=None, max_examples=40)
@given(data=st.data(), kind=st.sampled_from(CELL_KINDS), is_merged=st.booleans())
def test_any_sequence_of_changes_equals_a_plain_search(
    data: st.DataObject, kind: IndexKind, is_merged: bool
) -> None:
    pool = clustered(300, seed=6)
    live: dict[int, int] = {}  # row -> vector
    with BuildThread() as builds, pytest.MonkeyPatch.context() as patch:
        if is_merged:
            patch.setattr(faiss_index, "MIN_TAIL", 20)
        index = opened(builds, kind, effort=EVERYTHING)
        fresh = itertools.count()
        for _ in range(data.draw(st.integers(1, 6))):
            gone = data.draw(st.lists(st.sampled_from(sorted(live)), unique=True)) if live else []
            new = [next(fresh) % 300 for _ in range(data.draw(st.integers(0, 60)))]
            new = [row for row in dict.fromkeys(new) if row not in live or row in gone]
            picked = data.draw(st.permutations(range(300)))[: len(new)]
            index.apply([*gone, 10_000], new, pool[picked] if new else NONE)
            for row in gone:
                del live[row]
            live.update(zip(new, picked, strict=True))
            if data.draw(st.booleans()):
                wait_until_built(index)
            rows = np.array(sorted(live), np.int64)
            assert index.rows().tolist() == rows.tolist()
            assert len(index) == len(live)
            vectors = pool[[live[int(row)] for row in rows]] if live else NONE
            allowed = np.array([row for row in rows if data.draw(st.booleans())], np.int64)
            is_allowed = np.isin(rows, allowed)
            query = unlike(pool[data.draw(st.integers(0, 299))])
            assert_equal_hits(final(index, query, 7).rows, rows, vectors, query)
            found = final(index, query, 7, allowed).rows
            assert_equal_hits(found, rows[is_allowed], vectors[is_allowed], query)
        index.close()


def unlike(vector: np.ndarray) -> np.ndarray:
    """A query near a vector, to which no other vector is equally near."""
    shifted = vector + 0.05 * np.random.default_rng(0).normal(size=vector.shape)
    return (shifted / np.linalg.norm(shifted)).astype(np.float32)


def assert_equal_hits(
    found: tuple[int, ...], rows: np.ndarray, vectors: np.ndarray, query: np.ndarray
) -> None:
    """Compare by scores, because rows with equal vectors may be exchanged."""
    wanted = np.array(nearest(rows, vectors, query, 7), np.int64)
    assert len(set(found)) == len(found) == len(wanted)
    scores = dict(zip(rows.tolist(), (vectors @ query).tolist(), strict=True))
    assert [scores[row] for row in found] == pytest.approx(
        [scores[row] for row in wanted.tolist()], abs=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.01, 0.2, 0.7])
def test_a_filter_holds_whether_few_or_many_rows_are_allowed(
    builds: BuildThread, kind: IndexKind, share: float
) -> None:
    vectors = clustered(4000, seed=7)
    index = loaded(builds, kind, vectors[:3000], SearchEffort(exact_limit=500, min_share=1))
    add(index, range(3000, 4000), vectors[3000:])
    index.apply(range(0, 4000, 7), (), NONE)
    mask = (np.random.default_rng(7).random(4000) < share) & (np.arange(4000) % 7 > 0)
    allowed = np.append(np.flatnonzero(mask), [9999, 10_000])  # these are in no index
    for query in clustered(10, seed=8):
        assert set(final(index, query, 10, allowed).rows) <= set(allowed.tolist())
    assert recall(index, np.flatnonzero(mask), vectors) >= (0.95 if kind is IndexKind.HNSW else 1)


@pytest.mark.parametrize("kind", [IndexKind.IVF, IndexKind.HNSW])
@pytest.mark.parametrize("are_removed", [False, True])
def test_rows_far_from_the_query_still_fill_the_hits(
    builds: BuildThread, monkeypatch: pytest.MonkeyPatch, kind: IndexKind, are_removed: bool
) -> None:
    vectors = clustered(6000, seed=9)
    query = vectors[0]
    far = np.sort(np.argsort(vectors @ query)[:3000])
    index = loaded(builds, kind, vectors, SearchEffort(exact_limit=100, min_share=1 / 16))
    allowed: np.ndarray | None = far
    if are_removed:
        monkeypatch.setattr(faiss_index, "MIN_TAIL", len(vectors))  # no merge meanwhile
        index.apply(np.setdiff1d(np.arange(6000), far).tolist(), (), NONE)
        allowed = None
    found = final(index, query, 10, allowed).rows
    assert set(found) <= set(far.tolist())
    assert len(found) == 10
    if kind is IndexKind.HNSW:
        assert found == nearest(far, vectors[far], query, 10)


def test_a_slow_caller_gets_the_first_and_the_last_stage(
    builds: BuildThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = loaded(builds, IndexKind.IVF, clustered(6000, seed=10))
    clock = ManualClock()
    monkeypatch.setattr(faiss_index, "time", SimpleNamespace(perf_counter=clock))
    progress = []
    for stage in index.search(clustered(1, seed=11)[0], 10):
        progress.append(stage.progress)
        clock.now += 0.5
    assert len(progress) == 2
    assert progress[0] < 1 / 4
    assert progress[1] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_search_ends_without_a_final_stage(
    builds: BuildThread, monkeypatch: pytest.MonkeyPatch, kind: IndexKind
) -> None:
    monkeypatch.setattr(faiss_base, "STEP_VECTORS", 1000)
    monkeypatch.setattr(faiss_base, "COMPARED_BLOCK", 100)
    vectors = clustered(9000, seed=13)
    index = loaded(builds, kind, vectors)
    few = np.arange(3000) if kind is IndexKind.HNSW else None
    asked = itertools.count()
    stages = list(index.search(vectors[0], 10, allowed=few, cancelled=lambda: next(asked) > 1))
    assert not any(stage.final for stage in stages)
    assert next(asked) <= 4, "the search went on"
    assert not list(index.search(vectors[0], 10, allowed=few, cancelled=lambda: True))


def test_changes_are_seen_by_later_searches_only(builds: BuildThread) -> None:
    vectors = clustered(5000, seed=14)
    index = loaded(builds, IndexKind.IVF, vectors)
    query = vectors[17]
    before = index.search(query, 5)
    first = next(before)  # its view is taken now
    index.apply([17], [6000], vectors[17:18])
    assert [first, *before][-1].rows[0] == 17
    assert final(index, query, 5).rows[0] == 6000


@pytest.mark.parametrize("kind", [IndexKind.AUTO, IndexKind.HNSW])
@pytest.mark.parametrize("precision", ["float32", "sq8"])
def test_bases_are_built_beside_searches_and_changes(
    builds: BuildThread,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: IndexKind,
    precision: Precision,
) -> None:
    monkeypatch.setattr(faiss_index, "MIN_TAIL", 200)
    monkeypatch.setattr(faiss_index, "FLAT_LIMIT", 1000)
    vectors = clustered(6000, seed=15)
    index = opened(builds, kind, tmp_path / "index", precision=precision)
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
    assert index.kind is (IndexKind.IVF if kind is IndexKind.AUTO else kind)
    rows = np.array([row for row in range(6000) if row % 50 >= 5])
    assert index.rows().tolist() == rows.tolist()
    is_exact = precision == "float32" and kind is IndexKind.AUTO
    assert recall(index, rows, vectors) >= (1 if is_exact else 0.9)
    index.close()


def test_a_search_does_not_wait_while_the_next_base_is_built(
    builds: BuildThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = clustered(2000, seed=16)
    index = loaded(builds, IndexKind.FLAT, vectors[:1000])
    is_building, may_end = threading.Event(), threading.Event()

    def held(*arguments: object) -> object:
        is_building.set()
        assert may_end.wait(60)
        return build_base(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(faiss_index, "build_base", held)
    index.set_kind(IndexKind.IVF)
    assert is_building.wait(60)
    add(index, range(1000, 2000), vectors[1000:])
    index.apply([3, 1003], (), NONE)
    rows = np.setdiff1d(np.arange(2000), [3, 1003])
    assert index.is_building
    assert recall(index, rows, vectors) == 1
    may_end.set()
    wait_until_built(index)
    assert index.kind is IndexKind.IVF
    assert index.rows().tolist() == rows.tolist()
    assert recall(index, rows, vectors) == 1


def test_a_build_that_fails_leaves_the_index_as_it_was(
    builds: BuildThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(faiss_index, "MIN_TAIL", 50)
    vectors = clustered(900, seed=16)
    index = opened(builds, folder=tmp_path / "index")
    index.load([(np.arange(100), vectors[:100])])
    (tmp_path / "index").rename(tmp_path / "moved")
    (tmp_path / "index").write_text("a file where the folder was")
    add(index, range(100, 200), vectors[100:200])
    wait_until_built(index)
    assert recall(index, np.arange(200), vectors) == 1
    (tmp_path / "index").unlink()
    add(index, range(200, 900), vectors[200:])
    wait_until_built(index)
    index.close()
    again = opened(builds, folder=tmp_path / "index")
    assert again.rows().tolist() == list(range(900))
    again.close()


def test_the_kind_changes_in_the_background(builds: BuildThread) -> None:
    vectors = clustered(3000, seed=17)
    index = loaded(builds, IndexKind.AUTO, vectors)
    for kind in (IndexKind.FLAT, IndexKind.IVF, IndexKind.HNSW, IndexKind.AUTO):
        index.set_kind(kind)
        wait_until_built(index)
        assert index.kind is (IndexKind.FLAT if kind is IndexKind.AUTO else kind)
        assert final(index, vectors[5], 9).rows == nearest(np.arange(3000), vectors, vectors[5], 9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["float32", "sq8"])
def test_a_reopened_index_has_the_rows_of_its_last_base(
    builds: BuildThread, tmp_path: Path, kind: IndexKind, precision: Precision
) -> None:
    vectors = clustered(3000, seed=18)
    index = opened(builds, kind, tmp_path, precision=precision)
    index.load([(np.arange(2000) * 2, vectors[:2000])])
    wait_until_built(index)
    hits = final(index, vectors[9], 5)
    add(index, range(1, 21, 2), vectors[2000:2010])
    index.close()
    again = opened(builds, kind, tmp_path, precision=precision)
    assert not again.is_building
    assert again.rows().tolist() == list(range(0, 4000, 2)), "the owner adds the tail again"
    assert again.kind is kind
    assert final(again, vectors[9], 5).rows == hits.rows
    again.close()


def test_a_reopened_index_takes_on_another_kind(builds: BuildThread, tmp_path: Path) -> None:
    vectors = clustered(3000, seed=20)
    index = opened(builds, IndexKind.IVF, tmp_path)
    index.load([(np.arange(3000), vectors)])
    index.close()
    again = opened(builds, IndexKind.FLAT, tmp_path)
    wait_until_built(again)
    assert again.kind is IndexKind.FLAT
    assert again.rows().tolist() == list(range(3000))
    again.close()


@pytest.mark.parametrize(
    "damage", ["a byte changed", "the end is missing", "no index", "another precision"]
)
def test_a_file_that_cannot_be_used_counts_as_none(
    builds: BuildThread, tmp_path: Path, damage: str
) -> None:
    # Exact vectors cannot be made from codes.
    precision: Precision = "sq8" if damage == "another precision" else "float32"
    index = opened(builds, folder=tmp_path, precision=precision)
    index.load([(np.arange(500), clustered(500, seed=22))])
    index.close()
    [file] = tmp_path.glob("*.faiss")
    content = file.read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    damaged = {"a byte changed": changed, "the end is missing": content[:-9], "no index": b"no"}
    file.write_bytes(damaged.get(damage, content))
    (tmp_path / "draft").write_bytes(b"of a killed process")
    again = opened(builds, folder=tmp_path)
    assert len(again) == 0
    assert not list(tmp_path.glob("*"))
    again.load([(np.arange(500), clustered(500, seed=22))])
    again.close()
    assert len(opened(builds, folder=tmp_path)) == 500


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_vectors_keep_their_codes_through_merges(
    builds: BuildThread, monkeypatch: pytest.MonkeyPatch, kind: IndexKind
) -> None:
    monkeypatch.setattr(faiss_index, "MIN_TAIL", 50)
    monkeypatch.setattr(faiss_index, "TAIL_SHARE", 0)
    vectors = clustered(3000, seed=19)
    index = loaded(builds, kind, vectors[:2000], precision="sq8")
    first = index.base
    stored = first.gather(np.arange(2000))
    assert np.abs(stored - vectors[:2000]).max() < 0.01
    for begin in (2000, 2300, 2600):
        add(index, range(begin, begin + 300), vectors[begin : begin + 300])
        wait_until_built(index)
    assert len(index.base) == 2900
    assert index.base is not first
    assert np.array_equal(index.base.gather(np.arange(2000)), stored)


@pytest.mark.parametrize("kind", CELL_KINDS)
def test_ranges_of_a_few_vectors_do_not_last(
    builds: BuildThread, monkeypatch: pytest.MonkeyPatch, kind: IndexKind
) -> None:
    """One vector tells no range, and all others would get its code."""
    monkeypatch.setattr(faiss_index, "MIN_TAIL", 50)
    vectors = clustered(2000, seed=23)
    index = loaded(builds, kind, vectors[:1], precision="sq8")
    add(index, range(1, 2000), vectors[1:])
    wait_until_built(index)
    assert len(index.base) == 2000
    assert recall(index, np.arange(2000), vectors) > 0.9


def test_a_build_that_failed_leaves_no_draft_and_is_tried_again(
    builds: BuildThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = clustered(300, seed=29)
    index = opened(builds, IndexKind.FLAT, tmp_path / "1")
    index.load([(np.arange(300), vectors)])

    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(faiss_files, "_synchronize", fail)
        full.setattr(faiss_index, "KIND_RETRY_S", 0.0)
        index.set_kind(IndexKind.IVF)
        wait_until_built(index)
    assert index.kind is IndexKind.FLAT
    assert not list(tmp_path.rglob("draft"))
    add(index, [300], clustered(1, seed=31))
    wait_until_built(index)
    assert index.kind is IndexKind.IVF
