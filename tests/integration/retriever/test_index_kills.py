"""A process that is killed while it merges leaves an index that opens."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search import faiss_index
from ragcache_retriever.search.faiss_index import BuildThread, FaissIndex, IndexOptions
from tests.kit.vectors import DIMENSION, EVERYTHING, clustered, final, nearest

NUM_KILLS = 10
NUM_VECTORS = 20_000
BATCH = 100

WRITER = """
import sys
from pathlib import Path
from tests.integration.retriever.test_index_kills import add_and_merge
add_and_merge(Path(sys.argv[1]))
"""


def opened(folder: Path, builds: BuildThread) -> FaissIndex:
    options = IndexOptions(IndexKind.IVF, effort=EVERYTHING)
    return FaissIndex.open(folder, DIMENSION, options, builds)


def add_and_merge(folder: Path) -> None:
    """Add vectors where the folder's index ends, and merge all the time, until killed."""
    faiss_index.MIN_TAIL = BATCH  # type: ignore[misc]
    faiss_index.TAIL_SHARE = 0  # type: ignore[misc]
    vectors = clustered(NUM_VECTORS, seed=1)
    with BuildThread() as builds:
        index = opened(folder, builds)
        print("started", flush=True)
        while True:
            begin = int(index.rows().max(initial=-1)) + 1
            if begin > NUM_VECTORS - BATCH:
                time.sleep(60)  # it has all vectors, and is killed soon
            end = begin + BATCH
            index.apply(range(begin - 5, begin), range(begin, end), vectors[begin:end])
            while index.is_building:
                time.sleep(0.001)


def test_an_index_survives_kills_while_it_merges(tmp_path: Path) -> None:
    vectors = clustered(NUM_VECTORS, seed=1)
    rng = np.random.default_rng(1)
    sizes: list[int] = []
    max_life_s = 0.4
    while len(sizes) < NUM_KILLS or not sizes[-1]:
        command = [sys.executable, "-c", WRITER, str(tmp_path / "index")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"started\n"
            time.sleep(rng.uniform(0.05, max_life_s))
            process.kill()
        with BuildThread() as builds:
            index = opened(tmp_path / "index", builds)
            rows = index.rows()
            sizes.append(len(rows))
            query = vectors[rng.integers(NUM_VECTORS)]
            assert final(index, query, 10).rows == nearest(rows, vectors[rows], query, 10)
            index.close()
        if not sizes[-1]:
            max_life_s *= 1.5  # a slow machine merges nothing in so short a time
    assert sizes == sorted(sizes), "a base that was complete is gone"
