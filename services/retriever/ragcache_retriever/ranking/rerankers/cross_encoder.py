"""A cross-encoder of sentence-transformers, from a folder or by its name on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.fusion import Scores
from ragcache_retriever.ranking.candidate_text import CandidateText

MAX_READ = 20
"""Best candidates that the model reads. On a CPU each takes tens of milliseconds."""
BATCH_SIZE = 8


class CrossEncoderReranker:
    """Reads question and text together. Candidates that it does not read stay behind the others.

    Args:
        source: A folder or a name on the hub. The constructor loads the model.
    """

    def __init__(self, source: str) -> None:
        # Importing torch takes seconds, and only this reranker needs it.
        from sentence_transformers import CrossEncoder  # noqa: PLC0415

        self._source = source
        try:
            self._model: Any = CrossEncoder(source)
        except (OSError, ValueError) as error:
            raise InvalidInput(
                "RAGCACHE_RERANKER_MODEL",
                f"{source!r} cannot be loaded: {error}",
                "name a folder or a cross-encoder of the hub",
            ) from error

    @property
    def name(self) -> str:
        """See Reranker."""
        return self._source

    def scores(self, question: str, texts: Sequence[CandidateText]) -> Scores:
        """See Reranker."""
        read = texts[:MAX_READ]
        pairs = [(question, f"{one.heading}\n{one.text}") for one in read]
        found = np.asarray(
            self._model.predict(pairs, batch_size=BATCH_SIZE, show_progress_bar=False), np.float64
        ).reshape(len(read), -1)[:, -1]
        unread = len(texts) - len(read)
        behind = found.min(initial=0.0) - np.arange(1.0, unread + 1)
        return np.concatenate([found, behind])

    def close(self) -> None:
        """Do nothing: there are no connections."""
