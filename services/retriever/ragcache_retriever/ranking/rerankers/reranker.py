"""The interface of rerankers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ragcache_core.retrieval.fusion import Scores
from ragcache_retriever.ranking.candidate_text import CandidateText

MAX_RERANKED = 50
"""Most candidates of a search that are reranked. More of them cost time and lose quality."""


class Reranker(Protocol):
    """Scores candidates by their texts. Any number of threads may call it."""

    @property
    def name(self) -> str:
        """The name of its model. What was learned of one says nothing of another one."""

    def scores(self, question: str, texts: Sequence[CandidateText]) -> Scores | None:
        """Return a score for each candidate, shape (len(texts),). None: the order stays.

        Args:
            texts: Of the best candidates of a search, best first.
        """

    def close(self) -> None:
        """Release connections."""
