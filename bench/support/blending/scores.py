"""Figures of answers: agreement with full computation, and F1 with right answers."""

from __future__ import annotations

import re
import string
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized_words(text: str) -> list[str]:
    """Return the words of an answer in lower case, without articles and punctuation, as SQuAD."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def answer_f1(answer: str, right: Sequence[str]) -> float:
    """Return the highest F1 of the words that an answer shares with a right answer, in [0, 1].

    Source: SQuAD 1.1 (Rajpurkar et al. 2016), section 6.1.
    """
    said = Counter(normalized_words(answer))
    return max((_f1(said, Counter(normalized_words(one))) for one in right), default=0.0)


def _f1(said: Counter[str], right: Counter[str]) -> float:
    common = sum((said & right).values())
    return 2 * common / (said.total() + right.total()) if common else 0.0


class Figures:
    """Figures of one method, by name: one for each question that has it."""

    def __init__(self) -> None:
        self._values: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, **figures: float) -> None:
        """Add the figures of a question."""
        for name, value in figures.items():
            self._values[name].append(value)

    def row(self) -> dict[str, float]:
        """Return the means."""
        return {name: round(fmean(values), 4) for name, values in self._values.items()}


def ratio(above: float | None, below: float | None) -> float | None:
    """Return a rounded ratio, None where it has no meaning."""
    return round(above / below, 4) if above is not None and below else None
