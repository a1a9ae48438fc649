"""Chooses which waiting texts are embedded together."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

MIN_LENGTH_SHARE = 0.8
"""A batch pads its texts to its longest. Texts shorter than this share of it wait for another."""

K = TypeVar("K", bound=Hashable)


class LengthBatcher(Generic[K]):
    """Batches texts of similar length, over all calls that wait.

    The calls take turns: each batch begins with the longest text of the next call. A call with many
    texts therefore delays a small one by at most one batch for each call that waits. Texts of any
    call complete the batch.

    Args:
        max_tokens: Most tokens of a batch, padding included. A longer text is a batch by itself.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        # The texts of each call as (length, index), shortest first. The first call is next.
        self._calls: dict[K, list[tuple[int, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: K, lengths: Sequence[int]) -> None:
        """Add the texts of a call, by their lengths in tokens."""
        if lengths:
            self._calls[call] = sorted((length, i) for i, length in enumerate(lengths))

    def drop(self, call: K) -> None:
        """Remove the texts of a call that still wait."""
        self._calls.pop(call, None)

    def take(self) -> list[tuple[K, int]]:
        """Remove the next batch and return it: calls, and the indexes of texts in them."""
        if not self._calls:
            return []
        first = next(iter(self._calls))
        texts = self._calls.pop(first)
        longest, index = texts.pop()
        if texts:
            self._calls[first] = texts  # now the last one
        batch = [(first, index)]
        while (len(batch) + 1) * longest <= self._max_tokens:
            found = self._take_similar(longest)
            if found is None:
                break
            batch.append(found)
        return batch

    def _take_similar(self, longest: int) -> tuple[K, int] | None:
        """Remove the longest text that is no longer than ``longest``, unless it is much shorter."""
        best_length = math.ceil(MIN_LENGTH_SHARE * longest) - 1
        best: tuple[K, int] | None = None
        for call, texts in self._calls.items():
            position = bisect_right(texts, longest, key=lambda text: text[0]) - 1
            if position >= 0 and texts[position][0] > best_length:
                best_length, best = texts[position][0], (call, position)
        if best is None:
            return None
        call, position = best
        _, index = self._calls[call].pop(position)
        if not self._calls[call]:
            del self._calls[call]
        return call, index
