"""Figures of answers: agreement with full computation, and F1 with right answers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Figures:
    """Figures of one method, one entry for each question.

    Attributes:
        kl: KL of the first token's distribution from full computation, in nats.
        mean_kl: The same as the mean over the tokens of full computation's answer.
        recomputed: Share of the reused tokens that were recomputed.
        rouge: ROUGE-L F1 with the answer of full computation.
        same: Whether all tokens are those of that answer.
        f1: F1 with a right answer.
        right: Whether the answer is right; in a run whose questions have one wording of it.
    """

    kl: list[float] = field(default_factory=list)
    mean_kl: list[float] = field(default_factory=list)
    recomputed: list[float] = field(default_factory=list)
    rouge: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Return the means of the figures that were measured."""
        return {
            name: round(fmean(values), 4)
            for name in self.__slots__
            if (values := getattr(self, name))
        }


def ratio(above: float | None, below: float | None) -> float | None:
    """Return a rounded ratio, None where it has no meaning."""
    return round(above / below, 4) if above is not None and below else None
