"""Files of a base: complete or absent, and refused if they are not what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.files import base_files
from ragcache_retriever.search.files.base_files import (
    BaseWriter,
    DamagedIndex,
    forget_base,
    open_base,
    verify,
)
from ragcache_retriever.search.segmented_index import IndexOptions, SegmentedIndex
from tests.kit.vectors import DIMENSION, clustered, running_threads, wait_until_built


def written(folder: Path, value: float = 1.0) -> base_files.OpenedBase:
    writer = BaseWriter(folder)
    writer.put("small", np.full(100, value))
    big = writer.allocate("big", (1000, 8), np.float32)
    big[:] = value
    return writer.finish({"kind": "flat"})


def test_what_was_written_is_opened(tmp_path: Path) -> None:
    written(tmp_path, 7)
    opened = open_base(tmp_path)
    assert opened is not None
    verify(opened)
    assert (opened.arrays["small"] == 7).all()
    assert (opened.arrays["big"] == 7).all()
    assert opened.facts == {"kind": "flat"}


def test_a_folder_without_a_base_is_no_error(tmp_path: Path) -> None:
    assert open_base(tmp_path / "none") is None


def test_a_later_base_replaces_the_one_before(tmp_path: Path) -> None:
    first = written(tmp_path, 1)
    second = written(tmp_path, 2)
    opened = open_base(tmp_path)
    assert opened is not None
    assert opened.folder == second.folder
    assert not first.folder.exists()
    assert (first.arrays["big"] == 1).all(), "searches may still read it"
    forget_base(first)
    assert open_base(tmp_path) is not None, "another one is current"
    forget_base(second)
    assert open_base(tmp_path) is None


def test_an_unfinished_base_leaves_the_one_before(tmp_path: Path) -> None:
    written(tmp_path, 1)
    writer = BaseWriter(tmp_path)
    writer.put("small", np.zeros(100))
    opened = open_base(tmp_path)
    assert opened is not None
    assert (opened.arrays["small"] == 1).all()
    written(tmp_path, 2)
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change_version(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))


def change_fact(path: Path) -> None:
    path.write_text(path.read_text().replace('"flat"', '"ivf"'))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("manifest.json", Path.unlink),
        ("manifest.json", cut),
        ("manifest.json", change_version),
        ("manifest.json", change_fact),
        ("manifest.json", lambda path: path.write_text("[]")),
        ("small.npy", Path.unlink),
        ("small.npy", cut),
        ("small.npy", flip),
        ("big.npy", Path.unlink),
        ("big.npy", cut),
        ("../current.json", cut),
        ("../current.json", lambda path: path.write_text("[]")),
        ("../current.json", lambda path: path.write_text('{"base": "other"}')),
    ],
)
def test_damaged_and_foreign_files_are_refused(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    opened = written(tmp_path)
    damage(opened.folder / name)
    with pytest.raises(DamagedIndex):
        open_base(tmp_path)


def test_a_large_file_is_checked_after_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = written(tmp_path)
    monkeypatch.setattr(base_files, "CHECKED_BYTES", 10_000)
    flip(opened.folder / "big.npy")
    found = open_base(tmp_path)
    assert found is not None
    with pytest.raises(DamagedIndex, match="big"):
        verify(found)


@pytest.mark.parametrize("name", ["rows", "vectors", "current", "foreign"])
def test_an_index_with_damaged_files_opens_empty(tmp_path: Path, name: str) -> None:
    vectors = clustered(500, seed=1)
    with running_threads(1) as threads:
        options = IndexOptions(IndexKind.IVF)
        index = SegmentedIndex.open(tmp_path, DIMENSION, options, threads)
        index.load([(np.arange(500), vectors)])
        index.close()
        if name == "foreign":
            written(tmp_path)
        else:
            flip(next(iter(tmp_path.rglob(f"{name}.*"))))
        again = SegmentedIndex.open(tmp_path, DIMENSION, options, threads)
        assert len(again) == 0
        again.load([(np.arange(500), vectors)])
        again.close()
        once_more = SegmentedIndex.open(tmp_path, DIMENSION, options, threads)
        assert len(once_more) == 500
        once_more.close()


def test_an_index_of_another_dimension_opens_empty(tmp_path: Path) -> None:
    with running_threads(1) as threads:
        index = SegmentedIndex.open(tmp_path, DIMENSION, IndexOptions(), threads)
        index.load([(np.arange(50), clustered(50, seed=1))])
        index.close()
        other = SegmentedIndex.open(tmp_path, 8, IndexOptions(), threads)
        assert len(other) == 0
        other.close()


def test_damage_that_is_found_later_is_gone_after_loading_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = clustered(500, seed=1)
    monkeypatch.setattr(base_files, "CHECKED_BYTES", 0)
    with running_threads(1) as threads:
        index = SegmentedIndex.open(tmp_path, DIMENSION, IndexOptions(), threads)
        index.load([(np.arange(500), vectors)])
        index.close()
        flip(next(iter(tmp_path.rglob("vectors.npy"))))
        again = SegmentedIndex.open(tmp_path, DIMENSION, IndexOptions(), threads)
        threads.background.submit(int).result()  # after the check
        assert again.is_damaged
        again.apply((), range(500, 5000), clustered(4500, seed=2))
        assert not again.is_building, "a merge would take over damaged vectors"
        again.load([(np.arange(500), vectors)])
        assert not again.is_damaged
        assert list(again.search(vectors[3], 1))[-1].rows == (3,)
        again.close()


def test_no_graph_is_built_from_damaged_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = clustered(500, seed=1)
    monkeypatch.setattr(base_files, "CHECKED_BYTES", 0)
    with running_threads(1) as threads:
        index = SegmentedIndex.open(tmp_path, DIMENSION, IndexOptions(), threads)
        index.load([(np.arange(500), vectors)])
        index.close()
        flip(next(iter(tmp_path.rglob("vectors.npy"))))
        # The build waits for the thread that finds the damage.
        options = IndexOptions(IndexKind.HNSW)
        again = SegmentedIndex.open(tmp_path, DIMENSION, options, threads)
        threads.background.submit(int).result()
        assert again.is_damaged
        assert again.kind is IndexKind.FLAT
        again.load([(np.arange(500), vectors)])
        wait_until_built(again)
        assert again.kind is IndexKind.HNSW
        again.close()
