"""Counts the tokens of parts of a document with few calls of the tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

CountTokens = Callable[[str], int]

MAX_CHARS_PER_TOKEN = 64
"""No tokenizer's tokens are longer on average. A longer text is too long without counting."""

# List items, table cells and gaps recur; longer texts hardly do.
_MAX_CACHED_CHARS = 16
_MAX_CACHED_COUNTS = 1 << 14


class Head(NamedTuple):
    """Lines that are repeated before a chunk that begins after them: text[start:end].

    They name the columns of a table, or open a fence of code.
    """

    start: int
    end: int
    tokens: int


class TokenCounter:
    """Counts tokens of spans of one document.

    Args:
        count_tokens: Returns the number of tokens of a text encoded by itself.
    """

    def __init__(self, text: str, count_tokens: CountTokens) -> None:
        self.text = text
        self._count_tokens = count_tokens
        # The search for an end counts some spans twice.
        self._count_long = functools.lru_cache(maxsize=16)(self._count_uncached)
        self._short_counts: dict[str, int] = {}

    def joined(self, start: int, end: int, head: Head | None = None) -> str:
        """Return text[start:end], after the lines of a head."""
        part = self.text[start:end]
        return part if head is None else f"{self.text[head.start : head.end]}\n{part}"

    def count(self, start: int, end: int, head: Head | None = None) -> int:
        """Return the tokens of text[start:end], after the lines of a head."""
        if head is not None or end - start > _MAX_CACHED_CHARS:
            return self._count_long(start, end, head)
        text = self.text[start:end]
        tokens = self._short_counts.get(text)
        if tokens is None:
            if len(self._short_counts) == _MAX_CACHED_COUNTS:
                self._short_counts.clear()
            tokens = self._short_counts[text] = self._count_tokens(text)
        return tokens

    def count_up_to(self, limit: int, start: int, end: int, head: Head | None = None) -> int | None:
        """Return the tokens of text[start:end] after a head, or None if they are over a limit."""
        if end - start > MAX_CHARS_PER_TOKEN * limit:
            return None
        tokens = self.count(start, end, head)
        return tokens if tokens <= limit else None

    def _count_uncached(self, start: int, end: int, head: Head | None) -> int:
        return self._count_tokens(self.joined(start, end, head))
