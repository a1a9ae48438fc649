"""Ranks by the dense and the lexical leg together, in stages.

The lexical leg runs in a thread of its own while the index searches. Each stage of the index is
fused with it, freed from copies, and made as diverse as the caller wants. A reranker takes
long, so the hits before it are a stage, too.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace

import numpy as np

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.retrieval.copies import CopyCandidate, KeptHit, without_copies
from ragcache_core.retrieval.diversity import diverse_order
from ragcache_core.retrieval.fusion import (
    DEFAULT_LEXICAL_WEIGHT,
    SCORE_STEP,
    Candidates,
    Scores,
    best_order,
    fused_scores,
    merged_legs,
    raised_scores,
)
from ragcache_core.retrieval.lexical.terms import is_identifier
from ragcache_core.retrieval.stage_counts import StageCounts
from ragcache_retriever.ranking.candidates import CandidatePool
from ragcache_retriever.ranking.rerankers import MAX_RERANKED, Reranker
from ragcache_retriever.ranking.search import (
    Hit,
    LegScores,
    Search,
    SearchedChunks,
    SearchMode,
    SearchStage,
)
from ragcache_retriever.search.lexical import question_terms
from ragcache_retriever.search.vector_index import IndexStage
from ragcache_retriever.store.records import LexicalHit

log = logging.getLogger(__name__)

LEG_HITS = 100
"""Hits that each leg contributes at least."""
MAX_LEG_HITS = 1600
"""Hits up to which the legs are asked for more, while too few are left without copies."""
LEXICAL_THREADS = 2
LEXICAL_DEADLINE_S = 1.0
"""Longest wait for the lexical leg after the index has finished. Then the dense leg ranks alone."""
EARLY_WAIT_S = 0.02
"""Longest wait for the lexical leg before an early stage, which is then left out."""
NOT_RERANKED_PROGRESS = 0.99
"""Progress of the stage that lacks the reranker alone."""
_LEG_GROWTH = 4
"""Each retry asks for this many times as many hits."""
_SPARE_HITS = 8
"""Candidates to examine beyond one and a half times the hits, to replace copies."""
_DIVERSE_HITS = 3
"""Hits to choose from, for each one that is returned, if diversity is wanted."""
_NO_DENSE_LEG = IndexStage((), (), 1.0, True, 1.0, 0)


class HybridRanking:
    """Finds and ranks the chunks that fit a question.

    Args:
        reranker: Orders the best candidates again. None: fused scores are final.
    """

    def __init__(self, reranker: Reranker | None = None) -> None:
        self.reranker = reranker
        self._threads = ThreadPoolExecutor(LEXICAL_THREADS, "lexical")
        # By generation, and whether a reranker changes the final stage alone.
        self._counts: defaultdict[tuple[int, bool], StageCounts] = defaultdict(StageCounts)

    def stages(self, search: Search, chunks: SearchedChunks) -> Iterator[SearchStage]:
        """Yield the stages of a search: at least one, the last one final, unless cancelled.

        It runs in a thread of its own search, and reads the store.
        """
        has_one_leg = search.mode in (SearchMode.DENSE, SearchMode.LEXICAL)
        reranker = None if has_one_leg else self.reranker
        counts = self._counts[chunks.generation, reranker is not None]
        return _HybridSearch(search, chunks, reranker, counts).stages(self._threads)

    def close(self) -> None:
        """Wait for the lexical legs that run, and release the reranker."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self.reranker is not None:
            self.reranker.close()


class _HybridSearch:
    """One search of one state of its collection."""

    def __init__(
        self, search: Search, chunks: SearchedChunks, reranker: Reranker | None, counts: StageCounts
    ) -> None:
        self._search = search
        self._chunks = chunks
        self._reranker = reranker
        self._counts = counts
        self._lexical_weight = _lexical_weight(search, chunks.lexical_weight)
        self._terms = question_terms(search.text)
        self._lexical: Future[list[LexicalHit]] | None = None
        self._pool = CandidatePool(chunks, 0 if search.vector is None else len(search.vector))
        self._early: list[tuple[float, tuple[int, ...]]] = []
        """Progress and rows of the early stages."""
        self._reranked: dict[int, float] = {}
        """The reranker's scores of the latest candidates, by row."""
        self._ranked: tuple[tuple[int, ...], tuple[float, ...], bool] | None = None
        """The dense hits that were ranked last, and whether they were reranked."""
        self._hits: tuple[Hit, ...] = ()
        self._is_short = False
        """Whether the latest hits are fewer than wanted, for lack of candidates."""

    def stages(self, threads: ThreadPoolExecutor) -> Iterator[SearchStage]:
        """Yield the stages. The lexical leg runs in the threads."""
        num_hits = max(LEG_HITS, 2 * self._search.top_k)
        if self._lexical_weight > 0.0:
            self._lexical = threads.submit(self._find_terms, num_hits)
        try:
            if self._lexical_weight == 1.0:
                yield self._stage(_NO_DENSE_LEG, num_hits)
                return
            for stage in self._chunks.nearest(self._search, num_hits):
                if stage.final and self._reranker and self._has_words(LEXICAL_DEADLINE_S):
                    before = replace(stage, progress=NOT_RERANKED_PROGRESS, final=False)
                    yield self._stage(before, num_hits)
                if stage.final or self._has_words(EARLY_WAIT_S):
                    yield self._stage(stage, num_hits)
        finally:
            if self._lexical is not None:
                self._lexical.cancel()

    def _stage(self, found: IndexStage, num_asked: int) -> SearchStage:
        lexical = self._lexical_hits() if found.final else self._early_lexical_hits()
        reranks = found.final and self._reranker is not None
        if (found.rows, found.scores, reranks) != self._ranked:
            self._ranked = found.rows, found.scores, reranks
            candidates, scores = self._fused(found, lexical)
            self._reranked = self._reranker_scores(candidates) if reranks else {}
            self._choose(candidates, scores)
        if found.final and self._is_short:
            self._add_hits(found, lexical, num_asked)
        rows = tuple(hit.row for hit in self._hits)
        if found.final:
            self._counts.learn(self._early, rows)
            return SearchStage(self._hits, found.progress, True, 1.0)
        self._early.append((found.progress, rows))
        probability = self._counts.probability(found.progress)
        return SearchStage(self._hits, found.progress, False, probability)

    def _add_hits(
        self, dense: IndexStage, lexical: Sequence[LexicalHit] | None, num_asked: int
    ) -> None:
        """Ask the legs for more hits while too few are left without copies."""
        while self._is_short and num_asked < MAX_LEG_HITS:
            has_more_dense = len(dense.rows) >= num_asked
            has_more_lexical = lexical is not None and len(lexical) >= num_asked
            if not (has_more_dense or has_more_lexical):
                return
            num_asked = min(_LEG_GROWTH * num_asked, MAX_LEG_HITS)
            try:
                if has_more_dense:
                    *_, dense = (_NO_DENSE_LEG, *self._chunks.nearest(self._search, num_asked))
                if has_more_lexical:
                    lexical = self._find_terms(num_asked)
            except RagCacheError as error:
                log.warning("search: too few hits without copies error=%s", error)
                return
            if self._search.cancelled():
                return
            self._choose(*self._fused(dense, lexical))

    # The lexical leg

    def _find_terms(self, num_hits: int) -> list[LexicalHit]:
        """Return the hits of the lexical leg. Any thread may call it.

        If the last hit is as good as others after it, some of them are hits, too.
        """
        find = functools.partial(
            self._chunks.store.lexical.hits,
            self._chunks.generation,
            self._terms,
            allowed=self._chunks.allowed,
            cancelled=self._search.cancelled,
        )
        found = find(_LEG_GROWTH * num_hits)
        if len(found) <= num_hits:
            return found
        last = _rank_key(found[num_hits - 1])
        return [hit for hit in found if _rank_key(hit) <= last]

    def _has_words(self, timeout_s: float) -> bool:
        """Wait for the lexical leg, and return whether it has ended or does not run."""
        if self._lexical is None:
            return True
        try:
            self._lexical.exception(timeout_s)
        except FutureTimeout:
            return False
        return True

    def _early_lexical_hits(self) -> list[LexicalHit] | None:
        """Return the hits of the leg, which has ended. None: it has failed or does not run."""
        if self._lexical is None or self._lexical.exception() is not None:
            return None
        return self._lexical.result()

    def _lexical_hits(self) -> list[LexicalHit] | None:
        """Wait for the leg. Return None if there is none, or if the dense leg ranks alone."""
        if self._lexical is None:
            return None
        try:
            return self._lexical.result(LEXICAL_DEADLINE_S)
        except FutureTimeout:
            problem = f"no answer within {LEXICAL_DEADLINE_S:g} s"
        except RagCacheError as error:
            problem = str(error)
        if self._lexical_weight == 1.0:
            raise Unavailable("lexical index", problem)
        generation = self._chunks.generation
        log.warning("search: dense leg ranks alone generation=%d problem=%s", generation, problem)
        return None

    # Ranking

    def _fused(
        self, dense: IndexStage, lexical: Sequence[LexicalHit] | None
    ) -> tuple[Candidates, Scores]:
        """Return the candidates of both legs, best first, and their fused scores."""
        weight = 0.0 if lexical is None else self._lexical_weight
        merged = merged_legs(
            np.array(dense.rows, np.int64),
            np.array(dense.scores, np.float64),
            np.array([hit.row for hit in lexical or ()], np.int64),
            np.array([hit.score for hit in lexical or ()], np.float64),
            np.array([hit.num_identifiers for hit in lexical or ()], np.int64),
        )
        if lexical and len(lexical) >= LEG_HITS and lexical[-1].num_identifiers:
            self._count_identifiers(merged)
        is_unknown = np.isnan(merged.dense)
        if self._search.vector is not None and weight < 1.0 and is_unknown.any():
            # Hits of the lexical leg alone have a similarity, too.
            vectors = self._pool.vectors(merged.rows[is_unknown].tolist())
            similarities = vectors @ self._search.vector
            merged.dense[is_unknown] = np.where(vectors.any(axis=1), similarities, np.nan)
        scores = fused_scores(merged, weight)
        order = best_order(scores, merged, self._pool.positions)
        raised = raised_scores(scores, merged.num_identifiers, most=1.0)
        return merged.taken(order), raised[order]

    def _count_identifiers(self, merged: Candidates) -> None:
        """Set the identifiers of hits that the lexical leg did not return for lack of space."""
        is_unknown = merged.lexical_ranks == 0
        names = [term for term in self._terms if is_identifier(term)]
        rows = merged.rows[is_unknown]
        try:
            found = self._chunks.store.lexical.hits(
                self._chunks.generation,
                names,
                len(rows),
                allowed=np.sort(rows),
                cancelled=self._search.cancelled,
            )
        except RagCacheError as error:
            log.warning("search: identifiers not counted error=%s", error)
            return
        counts = {hit.row: hit.num_identifiers for hit in found}
        merged.num_identifiers[is_unknown] = [counts.get(row, 0) for row in rows.tolist()]

    def _reranker_scores(self, candidates: Candidates) -> dict[int, float]:
        """Return the reranker's scores of the first MAX_RERANKED candidates, by row."""
        assert self._reranker is not None
        rows: list[int] = candidates.rows[:MAX_RERANKED].tolist()
        if not rows:
            return {}
        scores = self._reranker.scores(self._search.text, self._pool.texts(rows))
        return {} if scores is None else dict(zip(rows, scores.tolist(), strict=True))

    def _choose(self, candidates: Candidates, fused: Scores) -> None:
        """Set the hits of a stage: without copies, diverse, and above the least score."""
        search = self._search
        scores = self._shown_scores(candidates, fused)
        reranked = np.array([self._reranked.get(row, np.nan) for row in candidates.rows.tolist()])
        num_comparable = len(scores)
        if self._reranked:
            # Candidates that were not reranked are worse than all that were. NaN is last.
            order = np.argsort(-reranked, kind="stable")
            candidates, reranked = candidates.taken(order), reranked[order]
            num_comparable = int(np.count_nonzero(~np.isnan(reranked)))
            scores = np.where(np.isnan(reranked), np.nanmin(reranked), reranked)
        is_complete = True
        if search.min_score is not None:
            # The score of a candidate that was not reranked is not known.
            count = int(np.count_nonzero(scores[:num_comparable] >= search.min_score))
            is_complete = count == len(scores)
            candidates, scores = candidates.taken(np.arange(count)), scores[:count]
        kept = self._without_copies(candidates.rows.tolist(), scores)
        self._is_short = len(kept) < search.top_k and is_complete
        if search.diversity > 0.0:
            indexes = [one.index for one in kept]
            vectors = self._pool.vectors(candidates.rows[indexes].tolist())
            order_of = diverse_order(scores[indexes], vectors, search.diversity, search.top_k)
            kept = [kept[i] for i in order_of]
        self._hits = tuple(_hit(candidates, scores, reranked, one) for one in kept)

    def _shown_scores(self, candidates: Candidates, fused: Scores) -> Scores:
        """Return what callers see: the score of the only leg, or the fused one."""
        if self._search.vector is None or self._search.mode is SearchMode.LEXICAL:
            return raised_scores(candidates.lexical, candidates.num_identifiers)
        return candidates.dense if self._search.mode is SearchMode.DENSE else fused

    def _without_copies(self, rows: Sequence[int], scores: Scores) -> list[KeptHit]:
        wanted = self._search.top_k
        if self._search.diversity > 0.0:
            limit = MAX_RERANKED if self._reranked else max(MAX_RERANKED, 2 * wanted)
            wanted = max(wanted, min(_DIVERSE_HITS * wanted, limit))
        num_spare = wanted // 2 + _SPARE_HITS
        examined = self._examined(rows, scores.tolist(), wanted + num_spare)
        return without_copies(
            examined, lambda i: self._pool.document_name(rows[i]), wanted, num_spare
        )

    def _examined(
        self, rows: Sequence[int], scores: Sequence[float], page: int
    ) -> Iterator[CopyCandidate]:
        """Yield candidates with their texts, which are read one page at a time."""
        pool = self._pool
        for begin in range(0, len(rows), page):
            if begin and self._search.cancelled():
                return
            pool.read(rows[begin : begin + page])
            for row, score in zip(rows[begin : begin + page], scores[begin:], strict=False):
                yield CopyCandidate(pool.passage(row), score, pool.version(row))


def _rank_key(hit: LexicalHit) -> tuple[int, float]:
    return -hit.num_identifiers, -round(hit.score / SCORE_STEP)


def _lexical_weight(search: Search, configured: float) -> float:
    """Return the weight for a search's mode and for the legs that it has."""
    if search.vector is None or search.mode is SearchMode.LEXICAL:
        return 1.0
    if search.mode is SearchMode.DENSE:
        return 0.0
    if search.mode is SearchMode.HYBRID and configured in (0.0, 1.0):
        return DEFAULT_LEXICAL_WEIGHT
    return configured


def _hit(candidates: Candidates, scores: Scores, reranked: Scores, kept: KeptHit) -> Hit:
    i = kept.index
    dense, lexical, rerank = (
        None if np.isnan(one[i]) else float(one[i])
        for one in (candidates.dense, candidates.lexical, reranked)
    )
    ranks = int(candidates.dense_ranks[i]), int(candidates.lexical_ranks[i])
    return Hit(
        int(candidates.rows[i]),
        float(scores[i]),
        LegScores(dense, ranks[0], lexical, ranks[1], rerank),
        tuple(int(candidates.rows[other]) for other in kept.duplicates),
    )
