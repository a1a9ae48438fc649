"""Searches of several callers at once, and the storage of an index."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support.staged.indexes import build, opened_index, searched
from bench.support.staged.stages import TOP_K, WHOLE, search
from ragcache_core.retrieval.index_kinds import IndexKind
from ragcache_retriever.search.faiss_base import FaissBase, SearchEffort
from ragcache_retriever.search.faiss_index import FaissIndex

CALLERS = (1, 8, 32)

Vectors = npt.NDArray[np.float32]


def measure_index(
    vectors: Vectors, queries: Vectors, effort: SearchEffort, num_searches: int
) -> dict[str, Any]:
    """Measure searches of several callers, and opening the file of an index."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with opened_index(vectors, effort, folder) as index:
            bytes_float32 = index.memory_bytes / len(vectors)
            rates = {
                callers: _searches_per_s(index, queries, callers, num_searches)
                for callers in CALLERS
            }
        began = time.perf_counter()
        with opened_index(vectors, effort, folder) as index:
            list(index.search(queries[0], TOP_K))
            open_s = time.perf_counter() - began
    return {
        **{
            f"shared_scan_gain_{callers}": round(rate / rates[1], 2)
            for callers, rate in rates.items()
            if callers > 1
        },
        "searches_per_s": round(rates[1], 1),
        "bytes_per_vector_float32": round(bytes_float32, 1),
        "open_s_per_million": round(open_s / len(vectors) * 1e6, 2),
    }


def measure_quantized(base: FaissBase, vectors: Vectors, queries: Vectors) -> dict[str, Any]:
    """Compare the hits of quantized vectors with those of float32, in all cells."""
    quantized = build(vectors, IndexKind.IVF, "sq8")
    with searched(base, WHOLE) as exact, searched(quantized, WHOLE) as index:
        shares = [
            len({*search(exact, one).stages[-1].rows} & {*search(index, one).stages[-1].rows})
            for one in queries
        ]
    return {
        "sq8_recall": round(float(np.mean(shares)) / TOP_K, 4),
        "bytes_per_vector_sq8": round(quantized.memory_bytes / len(vectors), 1),
    }


def _searches_per_s(index: FaissIndex, queries: Vectors, callers: int, num_searches: int) -> float:
    """Return the rate of callers that each search one query after another."""

    def work(first: int) -> None:
        for i in range(first, num_searches, callers):
            list(index.search(queries[i % len(queries)], TOP_K))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(callers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return num_searches / (time.perf_counter() - began)
