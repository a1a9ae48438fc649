"""Finds where the words of a question occur in texts, without splitting the texts into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MIN_STEM_CHARS = 4
_SUFFIXES = (
    "ations",
    "ation",
    "ings",
    "ing",
    "ies",
    "ied",
    "ers",
    "ed",
    "es",
    "er",
    "ly",
    "s",
    "e",
)
_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True, eq=False)
class TermMatches:
    """Occurrences of terms in texts, all arrays of shape (n,), by text and then by position.

    Attributes:
        texts: Index of the text.
        terms: Index of the term.
        positions: Characters before the occurrence.
    """

    texts: Ints
    terms: Ints
    positions: Ints


def stem_of(word: str) -> str:
    """Return the beginning that forms of a word have in common. It has MIN_STEM_CHARS at least."""
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= MIN_STEM_CHARS:
            return word[: -len(suffix)]
    return word


def find_terms(stems: Sequence[str], texts: Sequence[str]) -> TermMatches:
    """Return where words begin with stems.

    Args:
        stems: In lower case, none of them empty.
        texts: In any case.
    """
    # One search through all texts at once takes a tenth of the time of one for each.
    joined = _SEPARATOR.join(texts).lower()
    if len(joined) != sum(map(len, texts)) + max(0, len(texts) - 1):
        texts = [text.lower() for text in texts]  # a capital letter that is two small ones
    ends = np.cumsum([len(text) + 1 for text in texts])
    starts, terms = [], []
    for i, stem in enumerate(stems):
        at = joined.find(stem)
        while at >= 0:
            if at == 0 or not joined[at - 1].isalnum():
                starts.append(at)
                terms.append(i)
            at = joined.find(stem, at + 1)
    order = np.argsort(np.array(starts, np.int64), kind="stable")
    found = np.array(starts, np.int64)[order]
    text_of = np.searchsorted(ends, found, side="right")
    first = np.concatenate([[0], ends[:-1]]) if texts else np.empty(0, np.int64)
    return TermMatches(text_of, np.array(terms, np.int64)[order], found - first[text_of])
