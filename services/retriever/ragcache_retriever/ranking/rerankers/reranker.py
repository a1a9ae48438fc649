"""The interface of rerankers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ragcache_core.retrieval.fusion import Candidates, Scores
from ragcache_core.retrieval.rank_features import CandidateText
from ragcache_retriever.search.vector_index import Vectors

MAX_RERANKED = 50
"""Most candidates of a search that are reranked. More of them cost time and lose quality."""


@dataclass(frozen=True, slots=True, eq=False)
class RerankRequest:
    """The best candidates of a search, best fused score first.

    Attributes:
        words: Of the question, as ``question_words`` returns them.
        fused: Fused scores, shape (n,).
        vectors: Embeddings, shape (n, dimension). A row of zeros: not known.
    """

    question: str
    words: Sequence[str]
    candidates: Candidates
    fused: Scores
    texts: Sequence[CandidateText]
    vectors: Vectors


class Reranker(Protocol):
    """Scores candidates by their texts. Any number of threads may call it."""

    @property
    def name(self) -> str:
        """The name of its model. What was learned of one says nothing of another one."""

    @property
    def is_fast(self) -> bool:
        """Whether it takes a few milliseconds. Others rerank the final stage only."""

    @property
    def needs_choice(self) -> bool:
        """Whether it is used only in collections whose questions have shown a gain."""

    def scores(self, request: RerankRequest) -> Scores | None:
        """Return a score for each candidate, shape (n,). None: the order stays."""

    def close(self) -> None:
        """Release connections."""
