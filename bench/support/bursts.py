"""Bursts of questions about one topic, whose documents overlap.

Source: RAGCache++ section 4.1. There, consecutive queries of a burst share a fixed part of their
documents, and the others are drawn from the same topic. So they share some more by chance.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer

from bench.support.sequences.requests import Part, PromptPart, SequenceRequest, template_parts
from ragcache_core.plan.prompt import CHUNK_SEPARATOR

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


DOCUMENT_TOKENS = 200
"""Length of a document, as in RAGCache++ section 4.1."""

_WORDS = (
    *("survey", "river", "valley", "harbour", "station", "market", "bridge", "garden", "museum"),
    *("tower", "library", "workshop", "visitors", "records", "season", "traffic", "council"),
    *("budget", "winter", "summer", "report", "team", "route", "ferry", "meadow", "signal"),
)
_TOWNS = ("Aldham", "Brenton", "Corvale", "Dunmore", "Eastley", "Farrow", "Glenby", "Hartwell")


class Facts:
    """Questions about documents in bursts, for one model.

    Args:
        model: Folder of the model, for its tokenizer and chat template.
    """

    def __init__(self, model: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._head, self._end = template_parts(model)
        self._seed = seed

    def requests(self, shape: BurstShape, count: int) -> list[SequenceRequest]:
        """Return a trace. Each question asks for a fact of one of its documents."""
        rng = random.Random(self._seed)
        requests = []
        for number, documents in enumerate(bursts(shape, count, self._seed)):
            town, _ = _fact(rng.choice(documents))
            question = f"Question {number + 1}: what is the depot code of {town}?"
            requests.append(
                SequenceRequest(
                    (
                        PromptPart("head", Part.STABLE, self._ids(self._head)),
                        *(self._document(one) for one in documents),
                        PromptPart(
                            f"question {number}", Part.TAIL, self._ids(question + self._end)
                        ),
                    )
                )
            )
        return requests

    def _document(self, number: int) -> PromptPart:
        rng = random.Random(f"{self._seed} {number}")
        town, code = _fact(number)
        words = " ".join(rng.choice(_WORDS) for _ in range(2 * DOCUMENT_TOKENS))
        text = f"Report on {town}. The depot code of {town} is {code}. Notes: {words}"
        separator = self._ids(CHUNK_SEPARATOR)
        ids = self._ids(text)[: DOCUMENT_TOKENS - len(separator)]
        return PromptPart(f"document {number:04d}", Part.PASSAGE, ids + separator)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _fact(number: int) -> tuple[str, int]:
    """Return the name of a document's subject, and its code."""
    town = _TOWNS[number % len(_TOWNS)]
    return f"{town} {number}", 1000 + 37 * number % 9000
