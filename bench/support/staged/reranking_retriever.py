"""Runs the retriever with a cross-encoder whose order the questions choose.

The model does all its work, on one core. It is the bundled embedder with a head of random weights,
which has the size and so the time of ms-marco-MiniLM-L6, but orders at random. So a question says
with a word whether the order of the search stays. With another word it gets its hits without the
model's work, so that the retriever learns quickly from many searches.

Run it as a program: ``python -m bench.support.staged.reranking_retriever``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch

from ragcache_core.retrieval.fusion import Scores
from ragcache_retriever import __main__ as retriever
from ragcache_retriever.ranking.rerankers import CandidateText, CrossEncoderReranker

KEPT, FAST = "orderkept", "withoutmodel"


class ChosenOrder(CrossEncoderReranker):
    """Reads the candidates, and scores them as the question wants. See Reranker."""

    def scores(self, question: str, texts: Sequence[CandidateText]) -> Scores:
        """See Reranker."""
        if FAST in question:
            scores: Scores = np.random.default_rng().random(len(texts))
        else:
            scores = super().scores(question, texts)
        return -np.arange(len(texts), dtype=np.float64) if KEPT in question else scores


if __name__ == "__main__":
    torch.set_num_threads(1)  # the engine computes on another core
    vars(retriever)["CrossEncoderReranker"] = ChosenOrder
    sys.exit(retriever.main())
