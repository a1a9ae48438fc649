"""The interface of rankings: what a search asks for, and the stages that it gets."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ragcache_retriever.ranking.rerankers.reranker import Reranker
from ragcache_retriever.search.vector_index import VectorIndex
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import Rows, Vectors


class SearchMode(enum.Enum):
    """Which legs a search has. AUTO: those that have a weight in the collection."""

    AUTO = enum.auto()
    DENSE = enum.auto()
    LEXICAL = enum.auto()
    HYBRID = enum.auto()


@dataclass(frozen=True, slots=True)
class LegScores:
    """Scores of a hit in the parts of a search that found it, and its ranks there, from 1."""

    dense: float | None = None
    dense_rank: int = 0
    lexical: float | None = None
    lexical_rank: int = 0
    reranked: float | None = None


@dataclass(frozen=True, slots=True)
class RankedRow:
    """A row of a stage.

    Attributes:
        duplicates: Rows of chunks with almost the same text that were left out.
    """

    row: int
    score: float
    legs: LegScores = field(default_factory=LegScores)
    duplicates: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankedStage:
    """The best rows so far, best first.

    Attributes:
        progress: Finished share of the search, in (0, 1].
        final_probability: That the final stage has the same rows in the same order, in [0, 1]: the
            share of past searches of the collection with such stages.
    """

    rows: tuple[RankedRow, ...]
    progress: float
    final: bool
    final_probability: float


@dataclass(frozen=True, slots=True)
class RankedSearch:
    """A search in one generation.

    Attributes:
        vector: Embedding of the question, shape (dimension,). None: the generation's embedder is
            not available, or the mode is LEXICAL.
        index: The generation's vectors. None if there is no vector.
        lexical_weight: The collection's weight of the lexical leg, in [0, 1].
        allowed: Sorted rows that may be found; None: all.
        cancelled: Asked between units of work of about a millisecond.
    """

    generation: int
    query: str
    vector: Vectors | None
    index: VectorIndex | None
    top_k: int
    mode: SearchMode
    lexical_weight: float
    allowed: Rows | None
    min_score: float | None
    diversity: float
    recall: float | None
    cancelled: Callable[[], bool]


class Ranking(Protocol):
    """Finds and ranks the chunks that fit a question."""

    @property
    def reranker(self) -> Reranker | None:
        """What orders the best candidates again, or None."""

    def stages(self, search: RankedSearch, store: DocumentStore) -> Iterator[RankedStage]:
        """Yield the stages of a search: at least one, the last one final, unless cancelled.

        It runs in a thread of its own search, and may read the store.
        """

    def close(self) -> None:
        """Wait for searches of the lexical index, and release connections."""
