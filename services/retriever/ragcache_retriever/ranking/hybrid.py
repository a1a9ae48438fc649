"""Ranks by the dense and the lexical leg together, in stages.

The lexical leg runs in a thread of its own while the index searches. Each stage of the index is
fused with it, reranked, freed from near duplicates, and made as diverse as the caller wants.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.retrieval.diversity import diverse_order
from ragcache_core.retrieval.fused_finality import (
    FusedFinalities,
    FusedFinality,
    FusedStage,
    SearchForm,
)
from ragcache_core.retrieval.fusion import (
    DEFAULT_LEXICAL_WEIGHT,
    FusionWeights,
    Scores,
    weights_from_text,
)
from ragcache_core.retrieval.near_duplicates import (
    DuplicateCandidate,
    KeptHit,
    without_duplicates,
)
from ragcache_retriever.ranking.candidate_pool import CandidatePool
from ragcache_retriever.ranking.fused_candidates import FusedCandidates, fuse_legs
from ragcache_retriever.ranking.rerankers.reranker import (
    MAX_RERANKED,
    Reranker,
    RerankRequest,
)
from ragcache_retriever.ranking.stages import (
    LegScores,
    RankedRow,
    RankedSearch,
    RankedStage,
    SearchMode,
)
from ragcache_retriever.search.files.learned_file import read_learned, write_learned
from ragcache_retriever.search.lexical import question_words
from ragcache_retriever.search.vector_index import IndexStage, VectorIndex, Vectors
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import LexicalHit

log = logging.getLogger(__name__)

LEG_HITS = 100
"""Hits that each leg contributes at least."""
LEXICAL_THREADS = 2
LEXICAL_DEADLINE_S = 1.0
"""Longest wait for the lexical leg after the index has finished. Then the dense leg ranks alone."""
EARLY_WAIT_S = 0.02
"""Longest wait for the lexical leg before an early stage, which is then left out."""
SAVED_SEARCHES = 256
"""Searches after which what was learned of early stages is saved, besides at the end."""
_SPARE_HITS = 8
_DIVERSE_HITS = 3
"""Hits to choose from, for each one that is returned, if diversity is wanted."""

_parsed_weights = lru_cache(maxsize=1024)(weights_from_text)


@dataclass(slots=True)
class _HybridSearch:
    """The state of one search."""

    search: RankedSearch
    weights: FusionWeights
    pool: CandidatePool
    words: list[str]
    reranker: Reranker | None
    lexical: Future[list[LexicalHit]] | None
    stages: list[FusedStage] = field(default_factory=list)
    last_hits: tuple[tuple[int, ...], tuple[float, ...], bool] | None = None
    last_rows: tuple[RankedRow, ...] = ()


class HybridRanking:
    """See the module.

    Args:
        reranker: Orders the best candidates again. None: fused scores are final.
        learned: File of what past searches tell of early stages. None: it ends with the process.
    """

    def __init__(self, reranker: Reranker | None = None, learned: Path | None = None) -> None:
        self._reranker = reranker
        self._learned = learned
        self._threads = ThreadPoolExecutor(LEXICAL_THREADS, "lexical")
        found = None if learned is None else read_learned(learned, FusedFinalities.from_json)
        self._finalities = found or FusedFinalities()
        self._num_unsaved = 0
        self._save_lock = threading.Lock()

    @property
    def optional_reranker(self) -> Reranker | None:
        """See Ranking."""
        reranker = self._reranker
        return reranker if reranker is not None and reranker.needs_choice else None

    @property
    def text_reranker(self) -> Reranker | None:
        """See Ranking. The others know candidates of a collection only."""
        reranker = self._reranker
        return None if reranker is None or reranker.needs_choice else reranker

    def stages(self, search: RankedSearch, store: DocumentStore) -> Iterator[RankedStage]:
        """Yield the stages of a search. See Ranking."""
        dimension = 0 if search.vector is None else len(search.vector)
        weights = _weights(search)
        running = _HybridSearch(
            search,
            weights,
            CandidatePool(store, search.generation, dimension),
            question_words(search.query),
            self._chosen_reranker(search, weights),
            None,
        )
        if weights.lexical > 0.0:
            running.lexical = self._threads.submit(
                store.lexical_hits,
                search.generation,
                running.words,
                _num_leg_hits(search),
                allowed=search.allowed,
                cancelled=search.cancelled,
            )
        try:
            if weights.lexical == 1.0 or search.vector is None or search.index is None:
                yield RankedStage(self._ranked(running, None, is_final=True), 1.0, True, 1.0)
            else:
                yield from self._dense_stages(running, search.index, search.vector)
        finally:
            if running.lexical is not None:
                running.lexical.cancel()

    def close(self) -> None:
        """Wait for the lexical legs that run, and release the reranker."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._save()
        if self._reranker is not None:
            self._reranker.close()

    def _chosen_reranker(self, search: RankedSearch, weights: FusionWeights) -> Reranker | None:
        if search.mode in (SearchMode.DENSE, SearchMode.LEXICAL) or self._reranker is None:
            return None
        if self._reranker.needs_choice and not weights.uses_ranker:
            return None
        return self._reranker

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
        finality = self._finality(running)
        found = tuple(one.row for one in rows)
        if stage.final:
            self._learn(finality, running.stages, found)
            return RankedStage(rows, stage.progress, True, 1.0)
        repeats = 0
        if running.stages and running.stages[-1].rows == found:
            repeats = running.stages[-1].num_repeats + 1
        fused = FusedStage(found, stage.final_probability, stage.progress, repeats)
        running.stages.append(fused)
        return RankedStage(rows, stage.progress, False, finality.probability(fused))

    def _finality(self, running: _HybridSearch) -> FusedFinality:
        search, reranker = running.search, running.reranker
        form = SearchForm.of(
            search.mode.name,
            reranker="" if reranker is None else reranker.name,
            diversity=search.diversity,
            top_k=search.top_k,
        )
        return self._finalities.of(search.generation, form)

    def _learn(
        self, finality: FusedFinality, stages: Sequence[FusedStage], final_rows: tuple[int, ...]
    ) -> None:
        if not stages:
            return
        finality.learn(stages, final_rows)
        self._num_unsaved += 1
        if self._num_unsaved >= SAVED_SEARCHES:
            self._num_unsaved = 0
            self._threads.submit(self._save)

    def _save(self) -> None:
        if self._learned is not None:
            with self._save_lock:
                write_learned(self._learned, self._finalities.to_json())

    def _ranked(
        self, running: _HybridSearch, stage: IndexStage | None, *, is_final: bool
    ) -> tuple[RankedRow, ...]:
        lexical = _lexical_hits(running) if is_final or stage is None else _done(running.lexical)
        dense: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
        if stage is not None:
            dense = (stage.rows, stage.scores)
        reranks = running.reranker is not None and (is_final or running.reranker.is_fast)
        if (*dense, reranks) == running.last_hits:
            return running.last_rows
        weights = running.weights
        if stage is not None and lexical is None:
            weights = weights.only_dense()
        fused = fuse_legs(
            dense,
            lexical or (),
            weights,
            max(MAX_RERANKED, 2 * running.search.top_k),
            query=running.search.vector,
            pool=running.pool,
        )
        reranked = _reranked(running, fused) if reranks else None
        rows = _chosen_rows(running, fused, reranked)
        running.last_hits, running.last_rows = (*dense, reranks), rows
        return rows


def _weights(search: RankedSearch) -> FusionWeights:
    """Return the weights for a search's mode and for the legs that it has."""
    weights = _parsed_weights(search.fusion)
    if search.vector is None or search.mode is SearchMode.LEXICAL:
        return weights.only_lexical()
    if search.mode is SearchMode.DENSE:
        return weights.only_dense()
    if search.mode is SearchMode.HYBRID and weights.lexical in (0.0, 1.0):
        return replace(weights, lexical=DEFAULT_LEXICAL_WEIGHT)
    return weights


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
    if running.weights.lexical == 1.0:
        raise Unavailable("lexical index", problem)
    log.warning("search: dense leg ranks alone generation=%d problem=%s", generation, problem)
    return None


def _reranked(running: _HybridSearch, fused: FusedCandidates) -> Scores | None:
    """Return the reranker's scores of the first MAX_RERANKED candidates."""
    assert running.reranker is not None
    first = fused.ordered(np.arange(min(MAX_RERANKED, len(fused.scores))), fused.scores)
    rows = first.candidates.rows.tolist()
    if not rows:
        return None
    return running.reranker.scores(
        RerankRequest(
            running.search.query,
            running.words,
            first.candidates,
            first.scores,
            running.pool.texts(rows),
            running.pool.vectors(rows),
        )
    )


def _chosen_rows(
    running: _HybridSearch, fused: FusedCandidates, reranked: Scores | None
) -> tuple[RankedRow, ...]:
    """Return the hits of a stage: without duplicates, diverse, and above the least score."""
    search = running.search
    scores = _shown_scores(running, fused)
    if reranked is not None:
        # Candidates that were not reranked are worse than all that were.
        order = np.argsort(-reranked, kind="stable")
        fused = fused.ordered(order, fused.scores)
        reranked = scores = reranked[order]
    if search.min_score is not None:
        count = int(np.count_nonzero(scores >= search.min_score))
        fused = fused.ordered(np.arange(count), fused.scores)
        scores = scores[:count]
    wanted = search.top_k if search.diversity == 0.0 else _DIVERSE_HITS * search.top_k
    kept = _without_duplicates(running.pool, fused.candidates.rows.tolist(), scores, wanted)
    if search.diversity > 0.0:
        indexes = [one.index for one in kept]
        vectors = running.pool.vectors(fused.candidates.rows[indexes].tolist())
        order_of = diverse_order(scores[indexes], vectors, search.diversity, search.top_k)
        kept = [kept[i] for i in order_of]
    return tuple(_row(fused, scores, reranked, one) for one in kept)


def _shown_scores(running: _HybridSearch, fused: FusedCandidates) -> Scores:
    """Return what callers see: the score of the only leg, or the fused one."""
    if running.search.vector is None or running.search.mode is SearchMode.LEXICAL:
        return fused.candidates.lexical
    if running.search.mode is SearchMode.DENSE:
        return fused.candidates.dense
    return fused.scores


def _without_duplicates(
    pool: CandidatePool, rows: Sequence[int], scores: Scores, wanted: int
) -> list[KeptHit]:
    examined = rows[: wanted + wanted // 2 + _SPARE_HITS]
    pool.read_texts(examined)
    return without_duplicates(
        [
            DuplicateCandidate(pool.shingles(row), score, pool.version(row))
            for row, score in zip(examined, scores.tolist(), strict=False)
        ],
        wanted,
    )


def _row(
    fused: FusedCandidates, scores: Scores, reranked: Scores | None, kept: KeptHit
) -> RankedRow:
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
            None if reranked is None else float(reranked[i]),
        ),
        tuple(int(candidates.rows[other]) for other in kept.duplicates),
    )
