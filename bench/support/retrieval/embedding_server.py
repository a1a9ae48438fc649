"""An embeddings endpoint that answers at once, with vectors that were generated before."""

from __future__ import annotations

import json
import threading
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from bench.support.retrieval.json_server import serving_json

DIMENSION = 384
_NUM_VECTORS = 1024


class _Embeddings:
    def __init__(self) -> None:
        vectors = np.random.default_rng(0).standard_normal((_NUM_VECTORS, DIMENSION))
        self._vectors = [
            json.dumps([round(float(value), 4) for value in vector]) for vector in vectors
        ]
        self._next = 0
        self._lock = threading.Lock()

    def reply(self, body: Any) -> bytes:
        count = len(body["input"])
        with self._lock:
            first, self._next = self._next, self._next + count
        rows = (
            f'{{"index":{i},"embedding":{self._vectors[(first + i) % _NUM_VECTORS]}}}'
            for i in range(count)
        )
        return f'{{"data":[{",".join(rows)}]}}'.encode()


def serving_embeddings() -> AbstractContextManager[str]:
    """Serve embeddings of 384 values from a thread. The context is the base URL."""
    return serving_json(_Embeddings().reply)
