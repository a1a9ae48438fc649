"""Chooses the weights of a collection's legs on questions that are made from its own chunks.

A sample of the chunks is searched. Some of them lack a sentence, which is the question that has to
find them. The cost does not depend on the size of the collection: a few hundred texts are embedded,
and the rest takes seconds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ragcache_core.retrieval.fusion import FusionWeights, Scores
from ragcache_core.retrieval.fusion_tuning import (
    NDCG_DEPTH,
    JudgedSearch,
    choose_weights,
    ndcg,
    ranker_helps,
)
from ragcache_core.retrieval.held_out_questions import held_out_question
from ragcache_retriever.documents.chunking import Chunk
from ragcache_retriever.ranking.candidate_pool import CandidatePool
from ragcache_retriever.ranking.fused_candidates import FusedCandidates, fuse_legs
from ragcache_retriever.ranking.rerankers.reranker import MAX_RERANKED, Reranker, RerankRequest
from ragcache_retriever.search.lexical import (
    HEADINGS_WEIGHT,
    TEXT_WEIGHT,
    TITLE_WEIGHT,
    question_words,
)
from ragcache_retriever.search.vector_index import Rows, Vectors
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import LexicalHit, Neighbourhood
from ragcache_retriever.store.sqlite.lexical import match_expression
from ragcache_retriever.store.sqlite.schema import WORD_TOKENIZER

MAX_CHUNKS = 2000
MAX_QUESTIONS = 128
_LEG_HITS = 100
_READ_AT_ONCE = 500
_STRIDE = 7919
"""A prime, so that questions come from all parts of a sample."""


@dataclass(frozen=True, slots=True)
class SampleQuestion:
    """A question and the position in the sample of the chunk that answers it."""

    text: str
    words: tuple[str, ...]
    answer: int


class TuningSample:
    """Chunks of one generation, some without the sentence that asks for them.

    Args:
        store: Where the chunks are read.
        embedded_text: Returns the text to embed for a title and a chunk.
    """

    def __init__(
        self,
        store: DocumentStore,
        generation: int,
        embedded_text: Callable[[str, Chunk], str],
    ) -> None:
        rows = store.rows(generation)
        positions = np.linspace(0, len(rows) - 1, min(MAX_CHUNKS, len(rows)), dtype=np.int64)
        picked = rows[np.unique(positions)]
        found: dict[int, Neighbourhood] = {}
        for start in range(0, len(picked), _READ_AT_ONCE):
            part = picked[start : start + _READ_AT_ONCE].tolist()
            found |= store.neighbourhoods(part, 0)
        read_rows, self._vectors = store.vectors(generation, sorted(found))
        self._chunks = [found[row] for row in read_rows.tolist()]
        self._generation = generation
        self._num_chunks = len(rows)
        self.questions: list[SampleQuestion] = []
        self._changed_texts: list[str] = []
        self._hold_out(embedded_text)

    @property
    def texts(self) -> list[str]:
        """Texts to embed: the changed chunks, then the questions."""
        return self._changed_texts + [question.text for question in self.questions]

    def choose(self, vectors: Vectors, ranker: Reranker | None) -> FusionWeights:
        """Return the weights, given the embeddings of ``texts``.

        Args:
            vectors: Shape (len(texts), dimension), of length 1.
            ranker: Used by the collection if it gains on the questions.
        """
        count = len(self.questions)
        sample_vectors = self._vectors.copy()
        sample_vectors[[question.answer for question in self.questions]] = vectors[:count]
        with _SampleLegs(self._chunks, sample_vectors) as legs:
            searches = [
                legs.search(question, vector)
                for question, vector in zip(self.questions, vectors[count:], strict=True)
            ]
            floor = float((vectors[count:] @ sample_vectors.T).mean()) if count else 0.0
            weights = choose_weights([_judged(search) for search in searches], floor)
            if ranker is not None and weights.num_questions:
                weights = replace(weights, uses_ranker=legs.gains(searches, weights, ranker))
        return replace(weights, generation=self._generation, num_chunks=self._num_chunks)

    def without_choice(self) -> FusionWeights:
        """Return the defaults, for a collection with too few questions."""
        return FusionWeights(
            uses_ranker=False, generation=self._generation, num_chunks=self._num_chunks
        )

    def _hold_out(self, embedded_text: Callable[[str, Chunk], str]) -> None:
        count = len(self._chunks)
        for i in range(count):
            if len(self.questions) == MAX_QUESTIONS:
                return
            position = i * _STRIDE % count if count % _STRIDE else i
            chunk = self._chunks[position].chunk
            found = held_out_question(chunk.text)
            words = question_words(found.question) if found is not None else []
            if found is not None and words:
                changed = replace(chunk, text=found.rest)
                self._chunks[position] = Neighbourhood(changed, (), ())
                self.questions.append(SampleQuestion(found.question, tuple(words), position))
                self._changed_texts.append(
                    embedded_text(chunk.title, Chunk(found.rest, chunk.heading_path))
                )


@dataclass(frozen=True, slots=True, eq=False)
class _LegHits:
    """What both legs have found for a question, by position in the sample."""

    question: SampleQuestion
    vector: Vectors
    dense: tuple[Sequence[int], Sequence[float]]
    lexical: Sequence[LexicalHit]
    pool: CandidatePool


class _SampleLegs:
    """The legs of a search over a sample, in memory."""

    def __init__(self, chunks: Sequence[Neighbourhood], vectors: Vectors) -> None:
        self._chunks = chunks
        self._vectors = vectors
        self._database = sqlite3.connect(":memory:")
        self._database.execute(
            "CREATE VIRTUAL TABLE words USING"
            f" fts5(title, headings, text, content='', tokenize='{WORD_TOKENIZER}')"
        )
        self._database.executemany(
            "INSERT INTO words (rowid, title, headings, text) VALUES (?, ?, ?, ?)",
            (
                (i, one.chunk.title, " ".join(one.chunk.heading_path), one.chunk.text)
                for i, one in enumerate(chunks)
            ),
        )

    def __enter__(self) -> _SampleLegs:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def search(self, question: SampleQuestion, vector: Vectors) -> _LegHits:
        """Return what the legs find for a question."""
        similarities = self._vectors @ vector
        best = np.argsort(-similarities, kind="stable")[:_LEG_HITS]
        found = self._database.execute(
            f"SELECT rowid, -bm25(words, {TITLE_WEIGHT}, {HEADINGS_WEIGHT}, {TEXT_WEIGHT}) AS score"
            " FROM words WHERE words MATCH ? ORDER BY score DESC, rowid LIMIT ?",
            (match_expression(question.words), _LEG_HITS),
        )
        return _LegHits(
            question,
            vector,
            (best.tolist(), similarities[best].tolist()),
            [LexicalHit(row, score) for row, score in found],
            CandidatePool(self, 0, self._vectors.shape[1]),
        )

    def gains(self, searches: Sequence[_LegHits], weights: FusionWeights, ranker: Reranker) -> bool:
        """Return whether a ranker improves on the fused order of the questions."""
        fused_quality, ranked_quality = [], []
        for one in searches:
            fused = _fused(one, weights, MAX_RERANKED)
            rows = fused.candidates.rows
            scores = ranker.scores(
                RerankRequest(
                    one.question.text,
                    one.question.words,
                    fused.candidates,
                    fused.scores,
                    one.pool.texts(rows.tolist()),
                    one.pool.vectors(rows.tolist()),
                )
            )
            order = np.argsort(-_known(scores, fused.scores), kind="stable")
            grades = {one.question.answer: 1}
            fused_quality.append(ndcg(rows[:NDCG_DEPTH].tolist(), grades))
            ranked_quality.append(ndcg(rows[order][:NDCG_DEPTH].tolist(), grades))
        return ranker_helps(fused_quality, ranked_quality)

    def vectors(self, generation: int, rows: Sequence[int]) -> tuple[Rows, Vectors]:
        """See ChunkReader."""
        wanted = np.array(sorted(rows), np.int64)
        return wanted, self._vectors[wanted]

    def neighbourhoods(self, rows: Collection[int], window: int) -> dict[int, Neighbourhood]:
        """See ChunkReader."""
        return {row: self._chunks[row] for row in rows}


def _judged(search: _LegHits) -> JudgedSearch:
    fused = _fused(search, FusionWeights(), 2 * _LEG_HITS)
    return JudgedSearch(fused.candidates, {search.question.answer: 1})


def _fused(search: _LegHits, weights: FusionWeights, limit: int) -> FusedCandidates:
    return fuse_legs(
        search.dense, search.lexical, weights, limit, query=search.vector, pool=search.pool
    )


def _known(scores: Scores | None, fused: Scores) -> Scores:
    return fused if scores is None else scores
