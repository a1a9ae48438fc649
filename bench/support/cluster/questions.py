"""Questions with a skewed popularity, and the documents that they are about."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

from bench.support.answers.question_sets import (
    KnownDocument,
    KnownQuestion,
    QuestionSet,
    read_xquad,
)
from bench.support.cluster.open_loop import Asked, poisson_times
from bench.support.retrieval.generated_documents import WORDS, make_pages

SKEW: Final = 1.0
"""A question of rank r has weight 1 / r ** SKEW. In RAGPulse the hottest 10 % of passages take
59 % of the uses; with these weights the hottest 10 % of 300 questions take 63 %."""

NUM_QUESTIONS: Final = 300
_PAGES_CHARS: Final = 150_000


def known_questions(data: Path | None, seed: int) -> QuestionSet:
    """Return XQuAD's documents and questions, or generated ones where there is no data."""
    rng = random.Random(seed)
    return _generated(rng) if data is None else read_xquad(data, NUM_QUESTIONS, rng)


def _generated(rng: random.Random) -> QuestionSet:
    pages = make_pages(_PAGES_CHARS, rng.randrange(1 << 30))
    documents = tuple(KnownDocument(page.id, "", page.text) for page in pages)
    texts = [rng.choice(pages).text.split() for _ in range(NUM_QUESTIONS)]
    quoted = [" ".join(words[rng.randrange(len(words)) :][:8]) for words in texts]
    questions = tuple(KnownQuestion(f'Where does it say "{words}"?', ()) for words in quoted)
    return QuestionSet("generated", documents, questions)


def skewed(texts: Sequence[str], num_requests: int, per_s: float, seed: int) -> list[Asked]:
    """Draw questions by the weight of their index, and give them the times of a Poisson process."""
    weights = list(accumulate((rank + 1) ** -SKEW for rank in range(len(texts))))
    drawn = random.Random(seed).choices(texts, cum_weights=weights, k=num_requests)
    times = poisson_times(num_requests, per_s, seed)
    return [Asked(at_s, text) for at_s, text in zip(times, drawn, strict=True)]


HOT_WORDS, PASTED_WORDS = 600, 500


def hot_document(seed: int) -> KnownDocument:
    """Return a document of one long chunk."""
    words = random.Random(seed).choices(WORDS, k=HOT_WORDS)
    return KnownDocument("hot", "", " ".join(words))


def hot_questions(num_requests: int, per_s: float, seed: int) -> list[Asked]:
    """Return questions with a long text of their own, which the engines have to compute."""
    rng = random.Random(seed)
    return [
        Asked(
            at_s,
            f"Compare this text with the document: {' '.join(rng.choices(WORDS, k=PASTED_WORDS))}",
        )
        for at_s in poisson_times(num_requests, per_s, seed)
    ]
