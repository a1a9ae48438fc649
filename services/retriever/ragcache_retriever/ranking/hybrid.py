"""Ranks by the dense and the lexical leg together, in stages.

The lexical leg runs in a thread of its own while the index searches. Each stage of the index is
fused with it, reranked, freed from near duplicates, and made as diverse as the caller wants.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.retrieval.diversity import diverse_order
from ragcache_core.retrieval.fusion import DEFAULT_LEXICAL_WEIGHT, Scores
from ragcache_core.retrieval.near_duplicates import (
    DuplicateCandidate,
    KeptHit,
    without_duplicates,
)
from ragcache_core.retrieval.stage_counts import StageCounts
from ragcache_retriever.ranking.candidate_pool import CandidatePool
from ragcache_retriever.ranking.fused_candidates import FusedCandidates, fuse_legs
from ragcache_retriever.ranking.rerankers.reranker import MAX_RERANKED, Reranker
from ragcache_retriever.ranking.stages import (
    LegScores,
    RankedRow,
    RankedSearch,
    RankedStage,
    SearchMode,
)
from ragcache_retriever.search.lexical import question_words
from ragcache_retriever.search.vector_index import IndexStage, VectorIndex, Vectors
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import LexicalHit

log = logging.getLogger(__name__)

LEG_HITS = 100
"""Hits that each leg contributes at least."""
MAX_LEG_HITS = 1600
"""Hits up to which the legs are asked for more, while too few are left without duplicates."""
LEXICAL_THREADS = 2
LEXICAL_DEADLINE_S = 1.0
"""Longest wait for the lexical leg after the index has finished. Then the dense leg ranks alone."""
EARLY_WAIT_S = 0.02
"""Longest wait for the lexical leg before an early stage, which is then left out."""
_LEG_GROWTH = 4
"""Each retry asks for this many times as many hits."""
_SPARE_HITS = 8
"""Candidates to examine beyond one and a half times the hits, to replace near duplicates."""
_DIVERSE_HITS = 3
"""Hits to choose from, for each one that is returned, if diversity is wanted."""

_Dense: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""Rows and scores of the dense leg, best first."""


@dataclass(slots=True)
class _HybridSearch:
    """The state of one search.

    Attributes:
        lexical_weight: For the search's mode and the legs that it has.
        stages: Progress and rows of the early stages.
        reranked: The reranker's scores of the latest candidates, by row.
        is_short: Whether the latest rows are fewer than wanted, for lack of candidates.
    """

    search: RankedSearch
    store: DocumentStore
    lexical_weight: float
    pool: CandidatePool
    words: list[str]
    reranker: Reranker | None
    lexical: Future[list[LexicalHit]] | None
    stages: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    reranked: dict[int, float] = field(default_factory=dict)
    last_hits: tuple[tuple[int, ...], tuple[float, ...], bool] | None = None
    last_rows: tuple[RankedRow, ...] = ()
    is_short: bool = False

    def find_words(self, num_hits: int) -> list[LexicalHit]:
        """Return the hits of the lexical leg. Any thread may call it."""
        search = self.search
        return self.store.lexical.hits(
            search.generation,
            self.words,
            num_hits,
            allowed=search.allowed,
            cancelled=search.cancelled,
        )


class HybridRanking:
    """See the module.

    Args:
        reranker: Orders the best candidates again. None: fused scores are final.
    """

    def __init__(self, reranker: Reranker | None = None) -> None:
        self._reranker = reranker
        self._threads = ThreadPoolExecutor(LEXICAL_THREADS, "lexical")
        # By generation, and whether a reranker changes the final stage alone.
        self._counts: defaultdict[tuple[int, bool], StageCounts] = defaultdict(StageCounts)

    @property
    def reranker(self) -> Reranker | None:
        """See Ranking."""
        return self._reranker

    def stages(self, search: RankedSearch, store: DocumentStore) -> Iterator[RankedStage]:
        """Yield the stages of a search. See Ranking."""
        dimension = 0 if search.vector is None else len(search.vector)
        lexical_weight = _lexical_weight(search)
        running = _HybridSearch(
            search,
            store,
            lexical_weight,
            CandidatePool(store, search.generation, dimension),
            question_words(search.query),
            self._chosen_reranker(search),
            None,
        )
        if lexical_weight > 0.0:
            running.lexical = self._threads.submit(running.find_words, _num_leg_hits(search))
        try:
            if lexical_weight == 1.0 or search.vector is None or search.index is None:
                yield RankedStage(self._ranked(running, None, is_final=True), 1.0, True, 1.0)
            else:
                yield from self._dense_stages(running, search.index, search.vector)
        finally:
            if running.lexical is not None:
                running.lexical.cancel()

    def close(self) -> None:
        """Wait for the lexical legs that run, and release the reranker."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._reranker is not None:
            self._reranker.close()

    def _chosen_reranker(self, search: RankedSearch) -> Reranker | None:
        has_one_leg = search.mode in (SearchMode.DENSE, SearchMode.LEXICAL)
        return None if has_one_leg else self._reranker

    def _dense_stages(
        self, running: _HybridSearch, index: VectorIndex, vector: Vectors
    ) -> Iterator[RankedStage]:
        search = running.search
        for stage in index.search(
            vector,
            _num_leg_hits(search),
            allowed=search.allowed,
            recall=search.recall,
            cancelled=search.cancelled,
        ):
            if stage.final or _is_done(running.lexical, EARLY_WAIT_S):
                yield self._stage(running, stage)

    def _stage(self, running: _HybridSearch, stage: IndexStage) -> RankedStage:
        rows = self._ranked(running, stage, is_final=stage.final)
        counts = self._counts[running.search.generation, running.reranker is not None]
        found = tuple(one.row for one in rows)
        if stage.final:
            counts.learn(running.stages, found)
            return RankedStage(rows, stage.progress, True, 1.0)
        running.stages.append((stage.progress, found))
        return RankedStage(rows, stage.progress, False, counts.probability(stage.progress))

    def _ranked(
        self, running: _HybridSearch, stage: IndexStage | None, *, is_final: bool
    ) -> tuple[RankedRow, ...]:
        lexical = _lexical_hits(running) if is_final or stage is None else _done(running.lexical)
        dense: _Dense = ((), ())
        if stage is not None:
            dense = (stage.rows, stage.scores)
        reranks = running.reranker is not None and is_final
        if (*dense, reranks) != running.last_hits:
            fused = _fused(running, dense, lexical)
            running.reranked = _reranked(running, fused) if reranks else {}
            running.last_hits = (*dense, reranks)
            _choose_rows(running, fused)
        if is_final and running.is_short:
            self._add_hits(running, dense, lexical)
        return running.last_rows

    def _add_hits(
        self, running: _HybridSearch, dense: _Dense, lexical: list[LexicalHit] | None
    ) -> None:
        """Ask the legs for more hits while too few are left without duplicates."""
        num_asked = _num_leg_hits(running.search)
        while running.is_short and num_asked < MAX_LEG_HITS:
            has_more_dense = len(dense[0]) >= num_asked
            has_more_lexical = lexical is not None and len(lexical) >= num_asked
            if not (has_more_dense or has_more_lexical):
                return
            num_asked = min(_LEG_GROWTH * num_asked, MAX_LEG_HITS)
            try:
                if has_more_dense:
                    dense = _more_dense_hits(running.search, num_asked)
                if has_more_lexical:
                    lexical = running.find_words(num_asked)
            except RagCacheError as error:
                log.warning("search: too few hits without duplicates error=%s", error)
                return
            if running.search.cancelled():
                return
            _choose_rows(running, _fused(running, dense, lexical))


def _lexical_weight(search: RankedSearch) -> float:
    """Return the weight for a search's mode and for the legs that it has."""
    if search.vector is None or search.mode is SearchMode.LEXICAL:
        return 1.0
    if search.mode is SearchMode.DENSE:
        return 0.0
    if search.mode is SearchMode.HYBRID and search.lexical_weight in (0.0, 1.0):
        return DEFAULT_LEXICAL_WEIGHT
    return search.lexical_weight


def _num_leg_hits(search: RankedSearch) -> int:
    return max(LEG_HITS, 2 * search.top_k)


def _is_done(lexical: Future[list[LexicalHit]] | None, timeout_s: float) -> bool:
    if lexical is None:
        return True
    try:
        lexical.exception(timeout_s)
    except FutureTimeout:
        return False
    return True


def _done(lexical: Future[list[LexicalHit]] | None) -> list[LexicalHit] | None:
    """Return the hits of a leg that has finished, or None if it has failed or does not run."""
    return None if lexical is None or lexical.exception() is not None else lexical.result()


def _lexical_hits(running: _HybridSearch) -> list[LexicalHit] | None:
    """Wait for the lexical leg. Return None if there is none, or if the dense leg ranks alone."""
    if running.lexical is None:
        return None
    generation = running.search.generation
    try:
        return running.lexical.result(LEXICAL_DEADLINE_S)
    except FutureTimeout:
        problem = f"no answer within {LEXICAL_DEADLINE_S:g} s"
    except RagCacheError as error:
        problem = str(error)
    if running.lexical_weight == 1.0:
        raise Unavailable("lexical index", problem)
    log.warning("search: dense leg ranks alone generation=%d problem=%s", generation, problem)
    return None


def _more_dense_hits(search: RankedSearch, num_hits: int) -> _Dense:
    """Search the index again. Without a final stage, because it was cancelled, there are none."""
    assert search.index is not None
    assert search.vector is not None
    found: _Dense = ((), ())
    for stage in search.index.search(
        search.vector,
        num_hits,
        allowed=search.allowed,
        recall=search.recall,
        cancelled=search.cancelled,
    ):
        found = stage.rows, stage.scores
    return found


def _fused(
    running: _HybridSearch, dense: _Dense, lexical: list[LexicalHit] | None
) -> FusedCandidates:
    weight = 0.0 if lexical is None else running.lexical_weight
    return fuse_legs(dense, lexical or (), weight, query=running.search.vector, pool=running.pool)


def _reranked(running: _HybridSearch, fused: FusedCandidates) -> dict[int, float]:
    """Return the reranker's scores of the first MAX_RERANKED candidates, by row."""
    assert running.reranker is not None
    rows: list[int] = fused.candidates.rows[:MAX_RERANKED].tolist()
    if not rows:
        return {}
    scores = running.reranker.scores(running.search.query, running.pool.texts(rows))
    return {} if scores is None else dict(zip(rows, scores.tolist(), strict=True))


def _choose_rows(running: _HybridSearch, fused: FusedCandidates) -> None:
    """Set the rows of a stage: without duplicates, diverse, and above the least score."""
    search = running.search
    scores = _shown_scores(running, fused)
    reranked = np.array(
        [running.reranked.get(row, np.nan) for row in fused.candidates.rows.tolist()]
    )
    num_comparable = len(scores)
    if running.reranked:
        # Candidates that were not reranked are worse than all that were. NaN is sorted to the end.
        order = np.argsort(-reranked, kind="stable")
        fused, reranked = fused.ordered(order, fused.scores), reranked[order]
        num_comparable = int(np.count_nonzero(~np.isnan(reranked)))
        scores = np.where(np.isnan(reranked), np.nanmin(reranked), reranked)
    is_complete = True
    if search.min_score is not None:
        # The score of a candidate that was not reranked is not known.
        count = int(np.count_nonzero(scores[:num_comparable] >= search.min_score))
        is_complete = count == len(scores)
        fused = fused.ordered(np.arange(count), fused.scores)
        scores = scores[:count]
    kept = _without_duplicates(running, fused.candidates.rows.tolist(), scores)
    running.is_short = len(kept) < search.top_k and is_complete
    if search.diversity > 0.0:
        indexes = [one.index for one in kept]
        vectors = running.pool.vectors(fused.candidates.rows[indexes].tolist())
        order_of = diverse_order(scores[indexes], vectors, search.diversity, search.top_k)
        kept = [kept[i] for i in order_of]
    running.last_rows = tuple(_row(fused, scores, reranked, one) for one in kept)


def _shown_scores(running: _HybridSearch, fused: FusedCandidates) -> Scores:
    """Return what callers see: the score of the only leg, or the fused one."""
    if running.search.vector is None or running.search.mode is SearchMode.LEXICAL:
        return fused.candidates.lexical
    if running.search.mode is SearchMode.DENSE:
        return fused.candidates.dense
    return fused.scores


def _without_duplicates(
    running: _HybridSearch, rows: Sequence[int], scores: Scores
) -> list[KeptHit]:
    search = running.search
    wanted = search.top_k
    if search.diversity > 0.0:
        limit = MAX_RERANKED if running.reranked else max(MAX_RERANKED, 2 * wanted)
        wanted = max(wanted, min(_DIVERSE_HITS * wanted, limit))
    num_spare = wanted // 2 + _SPARE_HITS
    candidates = _examined(running, rows, scores.tolist(), wanted + num_spare)
    return without_duplicates(candidates, wanted, num_spare)


def _examined(
    running: _HybridSearch, rows: Sequence[int], scores: Sequence[float], page: int
) -> Iterator[DuplicateCandidate]:
    """Yield candidates with their texts, which are read one page at a time."""
    pool = running.pool
    for begin in range(0, len(rows), page):
        if begin and running.search.cancelled():
            return
        pool.read_texts(rows[begin : begin + page])
        for row, score in zip(rows[begin : begin + page], scores[begin:], strict=False):
            yield DuplicateCandidate(pool.shingles(row), score, pool.version(row))


def _row(fused: FusedCandidates, scores: Scores, reranked: Scores, kept: KeptHit) -> RankedRow:
    candidates, i = fused.candidates, kept.index
    dense, lexical = float(candidates.dense[i]), float(candidates.lexical[i])
    return RankedRow(
        int(candidates.rows[i]),
        float(scores[i]),
        LegScores(
            None if np.isnan(dense) else dense,
            int(candidates.dense_ranks[i]),
            None if np.isnan(lexical) else lexical,
            int(candidates.lexical_ranks[i]),
            None if np.isnan(reranked[i]) else float(reranked[i]),
        ),
        tuple(int(candidates.rows[other]) for other in kept.duplicates),
    )
