"""Scores texts that no collection holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ragcache_core.retrieval.fusion import Scores
from ragcache_retriever.embedding.embedder import Embedder
from ragcache_retriever.ranking.candidate_text import CandidateText
from ragcache_retriever.ranking.rerankers.reranker import MAX_RERANKED, Reranker


async def score_texts(
    embedder: Embedder,
    reranker: Reranker | None,
    query: str,
    texts: Sequence[str],
) -> Scores:
    """Return how well each text answers a query, shape (len(texts),).

    Args:
        reranker: Reads the texts that are nearest to the query; the others come after them. None:
            the cosine is the score.

    Raises:
        Unavailable: The embedder does not answer.
        InvalidInput: The embedder refuses a text.
    """
    vectors = await embedder.embed([query, *texts], urgent=True)
    cosines: Scores = (vectors[1:] @ vectors[0]).astype(np.float64)
    if reranker is None:
        return cosines
    found = await asyncio.to_thread(_reranked, reranker, query, texts, cosines)
    return cosines if found is None else found


def _reranked(
    reranker: Reranker, query: str, texts: Sequence[str], cosines: Scores
) -> Scores | None:
    order = np.argsort(-cosines, kind="stable")
    read = order[:MAX_RERANKED]
    scores = reranker.scores(query, [CandidateText("", texts[i]) for i in read.tolist()])
    if scores is None:
        return None
    found = np.empty(len(texts))
    found[read] = scores
    unread = order[MAX_RERANKED:]
    found[unread] = scores.min(initial=0.0) - np.arange(1.0, len(unread) + 1)
    return found
