"""Documents and questions that a benchmark makes itself: facts with one answer each."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

from bench.support.ordering.bursts import BurstShape, bursts
from bench.support.sequences.prompts import Part, PromptPart, SequenceRequest
from bench.support.sequences.sources import template_parts
from ragcache_core.plan.prompt import CHUNK_SEPARATOR

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
