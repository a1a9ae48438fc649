"""Ranks by one leg: the dense one, or the lexical one if there is no vector."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ragcache_retriever.ranking.stages import LegScores, RankedRow, RankedSearch, RankedStage
from ragcache_retriever.store.document_store import DocumentStore

_WORD = re.compile(r"\w+")


class SingleLegRanking:
    """See the module."""

    def stages(self, search: RankedSearch, store: DocumentStore) -> Iterator[RankedStage]:
        """Yield the stages of a search. See Ranking."""
        if search.vector is None or search.index is None:
            yield self._lexical(search, store)
            return
        for stage in search.index.search(
            search.vector,
            search.top_k,
            allowed=search.allowed,
            recall=search.recall,
            cancelled=search.cancelled,
        ):
            hits = zip(stage.rows, stage.scores, strict=True)
            rows = tuple(
                RankedRow(row, score, LegScores(dense=score, dense_rank=rank))
                for rank, (row, score) in enumerate(hits, 1)
                if search.min_score is None or score >= search.min_score
            )
            yield RankedStage(rows, stage.progress, stage.final, stage.final_probability)

    def _lexical(self, search: RankedSearch, store: DocumentStore) -> RankedStage:
        words = list(dict.fromkeys(_WORD.findall(search.query)))
        hits = store.lexical_hits(search.generation, words, search.top_k, allowed=search.allowed)
        rows = tuple(
            RankedRow(hit.row, hit.score, LegScores(lexical=hit.score, lexical_rank=rank))
            for rank, hit in enumerate(hits, 1)
            if search.min_score is None or hit.score >= search.min_score
        )
        return RankedStage(rows, 1.0, True, 1.0)
