"""Generated documents: Markdown pages, and plain chunks in large numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_WORDS = """
a access after all an and application are as at backup be before by can certificate change check
client cluster command configuration connection container controller data database default delete
deployment disk each error event example field file follows for from group has if image in
instance is it job key label limit list log manifest memory metric must namespace network new no
node not number object of on one operator option or order other path pod policy port process query
rate read reference release replica report request resource restart result rule run secret server
service set setting should size source start state status storage store string sync system table
target template that the these they this time to token type update upgrade use user value version
volume when which will with without work write
"""
WORDS = _WORDS.split()
_VOCABULARY = 50_000
_CHUNK_WORDS = 120


@dataclass(frozen=True, slots=True)
class Page:
    """A Markdown document."""

    id: str
    text: str


def make_pages(num_chars: int, seed: int = 0) -> list[Page]:
    """Return generated documents of sizes as in the documentation of software.

    Many are short, and few are long.
    """
    draw = random.Random(seed)
    pages: list[Page] = []
    while num_chars > 0:
        wanted = min(40_000, int(draw.lognormvariate(8.4, 1.1)) + 300)
        text = _page(draw, wanted)
        pages.append(Page(f"page-{len(pages)}", text))
        num_chars -= len(text)
    return pages


def _page(draw: random.Random, num_chars: int) -> str:
    parts = [f"# {_words(draw, 3)}\n"]
    while sum(map(len, parts)) < num_chars:
        kind = draw.random()
        if kind < 0.15:
            parts.append(f"## {_words(draw, draw.randint(1, 5))}\n")
        elif kind < 0.3:
            items = (f"- {_sentence(draw)}\n" for _ in range(draw.randint(2, 8)))
            parts.append("".join(items))
        elif kind < 0.4:
            lines = (f"{_words(draw, 1)}: {_words(draw, 2)}\n" for _ in range(draw.randint(2, 15)))
            parts.append("```yaml\n" + "".join(lines) + "```\n")
        else:
            sentences = (_sentence(draw) for _ in range(draw.randint(1, 6)))
            parts.append(" ".join(sentences) + "\n")
    return "\n".join(parts)


def _sentence(draw: random.Random) -> str:
    return _words(draw, draw.randint(6, 24)).capitalize() + "."


def _words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


class ChunkTexts:
    """Texts of words that are as frequent as words of a language (Zipf's law)."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = np.random.default_rng(seed)
        ranks = np.arange(1, _VOCABULARY + 1)
        shares = 1 / (ranks + 2.7)
        self._bounds = np.cumsum(shares / shares.sum())
        self._words = np.array([_word(int(rank)) for rank in ranks])

    def text(self, num_words: int = _CHUNK_WORDS) -> str:
        """Return a text of a number of words."""
        return next(self.texts(1, num_words))

    def texts(self, count: int, num_words: int = _CHUNK_WORDS) -> Iterator[str]:
        """Yield texts of a number of words each."""
        drawn = np.searchsorted(self._bounds, self._draw.random((count, num_words)))
        for row in self._words[np.minimum(drawn, _VOCABULARY - 1)]:
            yield " ".join(row)


def _word(rank: int) -> str:
    """Return a word of its own for each rank, short for frequent ones."""
    letters = ""
    while rank:
        rank, digit = divmod(rank, 85)
        letters += "bcdfghklmnprstvwz"[digit // 5] + "aeiou"[digit % 5]
    return letters
