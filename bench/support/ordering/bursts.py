"""Bursts of questions about one topic, whose documents overlap.

Source: RAGCache++ section 4.1. There, consecutive queries of a burst share a fixed part of their
documents, and the others are drawn from the same topic. So they share some more by chance.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

DOCUMENTS_PER_QUESTION = 5
DOCUMENTS_PER_REGION = 10
"""Of one topic. A burst takes its documents from them."""

BURST = 10
"""Questions of one burst."""

NOISE = 1.0
"""Standard deviation of a document's score between questions. Its mean score differs between
documents with a standard deviation of 1. So half of the variance of ranks comes from the question.
"""


@dataclass(frozen=True, slots=True)
class BurstShape:
    """Shape of a trace.

    Attributes:
        overlap: Share of a question's documents that are taken from the question before it in the
            burst. The others are drawn from the topic, so they may be in it, too.
        regions: Number of topics.
    """

    overlap: float
    regions: int = 10


def bursts(shape: BurstShape, num_questions: int, seed: int) -> list[list[int]]:
    """Return the documents of each question, best rank first. Equal arguments give equal traces."""
    rng = random.Random(seed)
    num_documents = shape.regions * DOCUMENTS_PER_REGION
    relevance = [rng.gauss(0, 1) for _ in range(num_documents)]
    num_shared = int(DOCUMENTS_PER_QUESTION * shape.overlap)
    questions: list[list[int]] = []
    region: list[int] = []
    for index in range(num_questions):
        shared: list[int] = []
        if index % BURST:
            shared = rng.sample(questions[-1], num_shared)
        else:
            first = rng.randrange(shape.regions) * DOCUMENTS_PER_REGION
            region = list(range(first, first + DOCUMENTS_PER_REGION))
        others = [document for document in region if document not in shared]
        chosen = shared + rng.sample(others, DOCUMENTS_PER_QUESTION - len(shared))
        scores = {document: relevance[document] + rng.gauss(0, NOISE) for document in chosen}
        questions.append(sorted(chosen, key=lambda document: -scores[document]))
    return questions


def mean_jaccard(questions: list[list[int]]) -> float:
    """Return the mean Jaccard index of the documents of consecutive questions."""
    indices = [
        len({*one} & {*other}) / len({*one} | {*other}) for one, other in pairwise(questions)
    ]
    return sum(indices) / len(indices)
