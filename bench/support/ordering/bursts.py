"""Bursts of questions about one topic, whose documents overlap.

Source: RAGCache++ section 4.1. There, consecutive queries of a burst share a fixed part of their
documents, and the others are drawn from the same topic. So they share some more by chance.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class BurstShape:
    """Shape of a trace.

    Attributes:
        overlap: Share of a question's documents that are taken from the question before it in the
            burst. The others are drawn from the topic, so they may be in it, too.
        documents_per_question: Documents of a question.
        documents_per_region: Documents of one topic. A burst takes its documents from them.
        regions: Number of topics.
        burst: Questions of one burst.
        noise: Standard deviation of a document's score between questions. Its mean score differs
            between documents with a standard deviation of 1. So 1 means that half of the variance
            of ranks comes from the question.
    """

    overlap: float
    documents_per_question: int = 5
    documents_per_region: int = 10
    regions: int = 10
    burst: int = 10
    noise: float = 1.0


def bursts(shape: BurstShape, num_questions: int, seed: int) -> list[list[int]]:
    """Return the documents of each question, best rank first. Equal arguments give equal traces."""
    rng = random.Random(seed)
    num_documents = shape.regions * shape.documents_per_region
    relevance = [rng.gauss(0, 1) for _ in range(num_documents)]
    num_shared = int(shape.documents_per_question * shape.overlap)
    questions: list[list[int]] = []
    region: list[int] = []
    for index in range(num_questions):
        shared: list[int] = []
        if index % shape.burst:
            shared = rng.sample(questions[-1], num_shared)
        else:
            first = rng.randrange(shape.regions) * shape.documents_per_region
            region = list(range(first, first + shape.documents_per_region))
        others = [document for document in region if document not in shared]
        chosen = shared + rng.sample(others, shape.documents_per_question - len(shared))
        scores = {document: relevance[document] + rng.gauss(0, shape.noise) for document in chosen}
        questions.append(sorted(chosen, key=lambda document: -scores[document]))
    return questions


def mean_jaccard(questions: list[list[int]]) -> float:
    """Return the mean Jaccard index of the documents of consecutive questions."""
    indices = [
        len({*one} & {*other}) / len({*one} | {*other}) for one, other in pairwise(questions)
    ]
    return sum(indices) / len(indices)
