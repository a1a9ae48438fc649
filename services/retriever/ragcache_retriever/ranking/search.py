"""What a search asks for, the chunks that it may find, and the stages that it gets."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ragcache_core.retrieval.filters import Filter
from ragcache_retriever.search.vector_index import IndexStage, VectorIndex
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import Neighbourhood, Rows, Vectors


class SearchMode(enum.Enum):
    """Which legs a search has. AUTO: those that have a weight in the collection."""

    AUTO = enum.auto()
    DENSE = enum.auto()
    LEXICAL = enum.auto()
    HYBRID = enum.auto()


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """A question to one collection, as SearchRequest in retriever.proto describes it.

    Attributes:
        vector: Embedding of the question, shape (dimension,). None: it is not known yet, the
            collection's embedder is not available, or the mode is LEXICAL.
        cancelled: Asked between units of work of about a millisecond.
    """

    collection: str
    text: str
    top_k: int
    mode: SearchMode = SearchMode.AUTO
    filter: Filter | None = None
    min_score: float | None = None
    diversity: float = 0.0
    recall: float | None = None
    vector: Vectors | None = None
    cancelled: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True, eq=False)
class SearchedChunks:
    """The chunks that a search may find: those of one generation of its collection.

    Attributes:
        index: Their vectors. None if the search has no vector.
        lexical_weight: The collection's weight of the lexical leg, in [0, 1].
        allowed: Sorted rows that may be found; None: all.
    """

    store: DocumentStore
    generation: int
    index: VectorIndex | None
    lexical_weight: float
    allowed: Rows | None = None

    def nearest(self, search: Search, num_hits: int) -> Iterator[IndexStage]:
        """Yield the stages of the index. The search has a vector."""
        assert self.index is not None
        assert search.vector is not None
        return self.index.search(
            search.vector,
            num_hits,
            allowed=self.allowed,
            recall=search.recall,
            cancelled=search.cancelled,
        )


@dataclass(frozen=True, slots=True)
class LegScores:
    """Scores of a hit in the parts of a search that found it, and its ranks there, from 1."""

    dense: float | None = None
    dense_rank: int = 0
    lexical: float | None = None
    lexical_rank: int = 0
    reranked: float | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that a search has found.

    Attributes:
        duplicates: Rows of copies that were left out.
    """

    row: int
    score: float
    legs: LegScores = field(default_factory=LegScores)
    duplicates: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SearchStage:
    """The best hits so far, best first.

    Attributes:
        progress: Finished share of the search, in (0, 1].
        final_probability: That the final stage has the same rows in the same order, in [0, 1]: the
            share of past searches of the collection with such stages.
        texts: The chunk of each hit with its neighbours, by row.
        positions: Document id and ordinal of the duplicates, by row. Some may have vanished.
        embed_s: Time until the question was embedded.
        search_s: Time from then until the end of the stage.
    """

    hits: tuple[Hit, ...]
    progress: float
    final: bool
    final_probability: float
    texts: Mapping[int, Neighbourhood] = field(default_factory=dict)
    positions: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    embed_s: float = 0.0
    search_s: float = 0.0
