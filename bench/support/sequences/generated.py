"""A generated sequence that needs no data: heads that vary, and passages by Zipf's law."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.support.sequences.prompts import Part, PromptPart, SequenceRequest, Vocabulary


@dataclass(frozen=True, slots=True)
class ZipfShape:
    """Sizes of a generated sequence; lengths are in tokens.

    Attributes:
        stable_tokens: The head that all requests share.
        changing_tokens: What follows it: date, user, session.
        passages: Passages of a request.
        passage_tokens: Shortest and longest passage.
        documents: Number of documents.
        passages_per_document: Number of passages that each of them has.
        exponent: A document of rank r is chosen with weight r to the minus exponent.
    """

    stable_tokens: int = 160
    changing_tokens: int = 40
    passages: int = 5
    passage_tokens: tuple[int, int] = (90, 180)
    question_tokens: int = 20
    documents: int = 60
    passages_per_document: int = 4
    exponent: float = 1.0


def generate(
    shape: ZipfShape, num_requests: int, vocabulary: Vocabulary, seed: int
) -> list[SequenceRequest]:
    """Generate a sequence. Equal arguments give equal sequences.

    A request has passages of one to three documents. From most it takes several neighbours, as a
    search does that finds a section.
    """
    rng = random.Random(seed)
    weights = [(rank + 1) ** -shape.exponent for rank in range(shape.documents)]
    lengths = {
        _passage(document, number): rng.randint(*shape.passage_tokens)
        for document in range(shape.documents)
        for number in range(shape.passages_per_document)
    }

    def part(role: Part, name: str, num_tokens: int) -> PromptPart:
        return PromptPart(name, role, vocabulary.draw(name, num_tokens))

    requests = []
    for index in range(num_requests):
        names: list[str] = []
        while len(names) < shape.passages:
            [document] = rng.choices(range(shape.documents), weights)
            first = rng.randrange(shape.passages_per_document)
            for number in range(first, min(first + 2, shape.passages_per_document)):
                name = _passage(document, number)
                if name not in names and len(names) < shape.passages:
                    names.append(name)
        requests.append(
            SequenceRequest(
                (
                    part(Part.STABLE, "system prompt", shape.stable_tokens),
                    part(Part.CHANGING, f"session {index}", shape.changing_tokens),
                    *(part(Part.PASSAGE, name, lengths[name]) for name in names),
                    part(Part.TAIL, f"question {index}", shape.question_tokens),
                )
            )
        )
    return requests


def topics(shape: ZipfShape) -> list[str]:
    """Return the names of all passages, by document."""
    return [
        _passage(document, number)
        for document in range(shape.documents)
        for number in range(shape.passages_per_document)
    ]


def _passage(document: int, number: int) -> str:
    return f"passage {document}.{number}"
