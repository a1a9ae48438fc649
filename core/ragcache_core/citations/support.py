"""Find the text that supports a sentence, by the words that they share.

A sentence is supported if most of its words, by their weight, are in one or two sentences of a
source, and all of its numbers are. A word weighs less the more often the sources have it, and the
shorter it is. So names and numbers decide, and words like "the" do not. The order of the words does
not count. If one of the two says "not", so has the other.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_MIN_COVERAGE: Final = 0.6
"""Least share of a sentence's weight that its support has."""

_JOIN_COST: Final = 0.1
"""Share of a sentence's weight that a second sentence of the source has to add."""

_FULL_WEIGHT_CHARS: Final = 6
_STEM_CHARS: Final = 6
_MAX_WORDS: Final = 96
"""Words of a sentence that are compared. It bounds the time that one without an end takes."""

_MAX_POSTINGS: Final = 512
"""Sentences in which a word may be and still counts."""

_NEGATIONS: Final = frozenset(
    {
        "not", "no", "never", "none", "cannot", "isn", "aren", "don", "doesn", "didn",
        "nicht", "kein", "keine", "keinen", "nie", "jamai", "nunca", "non",
    }
)  # fmt: skip
"""Words that turn a sentence into its opposite, in the form that is compared."""

_WORD: Final = re.compile(r"\w+")
# Thai, Lao, Japanese and Chinese, which have no spaces between words. Pairs of characters stand
# for words.
_UNSPACED: Final = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+")
_BREAK: Final = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\s*\n\s*")


@dataclass(frozen=True, slots=True)
class Support:
    """The part of a source that supports a sentence.

    Args:
        source: Index of the source.
        start: First character of the part in the source's text.
        end: The character after its last one.
    """

    source: int
    start: int
    end: int


class SupportIndex:
    """The sentences of some sources, by their words.

    Args:
        sources: Texts, the best one first. Of equal supports the one of an earlier source is taken.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self._segments: list[Support] = []
        self._words: list[frozenset[str]] = []
        self._postings: defaultdict[str, list[int]] = defaultdict(list)
        for source, text in enumerate(sources):
            for start, end in _segments(text):
                words = frozenset(_words(text[start:end]))
                for word in words:
                    self._postings[word].append(len(self._segments))
                self._segments.append(Support(source, start, end))
                self._words.append(words)

    def find(self, sentence: str) -> Support | None:
        """Return the part that supports a sentence; None: no part does."""
        words = list(dict.fromkeys(_words(sentence)))[:_MAX_WORDS]
        postings = {word: self._postings.get(word, ()) for word in words}
        weights = {
            word: _weight(word, len(found))
            for word, found in postings.items()
            if len(found) <= _MAX_POSTINGS
        }
        total = math.fsum(weights.values())
        least = _MIN_COVERAGE * total
        numbers = {word for word in words if _is_number(word)}
        is_negated = not _NEGATIONS.isdisjoint(words)
        shared: defaultdict[int, float] = defaultdict(float)
        for word, weight in weights.items():
            for i in postings[word]:
                shared[i] += weight
        best: tuple[float, int, int] | None = None
        for first, last in self._spans(shared, least):
            found = self._words[first] | self._words[last]
            common = weights.keys() & found
            weight = math.fsum(weights[word] for word in common)
            if weight < least or not numbers <= found or not any(map(_is_telling, common)):
                continue
            if is_negated == _NEGATIONS.isdisjoint(found):
                continue
            # A second sentence has to add something. Of equal parts the first one is taken.
            rank = (weight - _JOIN_COST * total * (last - first), -first, -last)
            best = rank if best is None else max(best, rank)
        if best is None:
            return None
        begin, end = self._segments[-best[1]], self._segments[-best[2]]
        return Support(begin.source, begin.start, end.end)

    def _spans(self, shared: Mapping[int, float], least: float) -> Iterator[tuple[int, int]]:
        """Yield the first and last segments of the parts whose words may weigh enough."""
        for i, weight in shared.items():
            if weight >= least:
                yield i, i
            after = i + 1
            # A sentence of an answer may join two of the source.
            if (
                after in shared
                and weight + shared[after] >= least
                and self._segments[after].source == self._segments[i].source
            ):
                yield i, after


def _weight(word: str, count: int) -> float:
    length = 1.0 if _is_number(word) else min(1.0, len(word) / _FULL_WEIGHT_CHARS)
    return length / math.sqrt(max(count, 1))


def _segments(text: str) -> Iterator[tuple[int, int]]:
    """Yield the beginning and end of each sentence or line."""
    start = 0
    for found in (*_BREAK.finditer(text), None):
        end = len(text) if found is None else found.start()
        if text[start:end].strip():
            yield start, end
        start = end if found is None else found.end()


def _words(text: str) -> Iterable[str]:
    """Yield the words of a text in a form that inflected words share."""
    for found in _WORD.findall(unicodedata.normalize("NFKC", text).casefold()):
        if _UNSPACED.search(found) is None:
            yield _stem(found)
            continue
        for run in re.split(f"({_UNSPACED.pattern})", found):
            if run and _UNSPACED.match(run):
                yield from (run[i : i + 2] for i in range(max(1, len(run) - 1)))
            elif run:
                yield _stem(run)


def _stem(word: str) -> str:
    if not word.isalpha():
        return word
    return word[:_STEM_CHARS] if len(word) > _STEM_CHARS else word.removesuffix("s")


def _is_telling(word: str) -> bool:
    """Whether a word can support a sentence: short words are in all texts."""
    return len(word) > 3 or _is_number(word) or not word.isascii()


def _is_number(word: str) -> bool:
    return any(map(str.isdecimal, word))
