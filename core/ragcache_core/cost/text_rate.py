"""How many characters of texts a component reads within a deadline, by what it has read before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ragcache_core.cost.linear_fit import LinearFit
from ragcache_core.errors import TooLarge

_READ_CHARS: Final = 32_768
"""Most characters of one text that count. Embedders read its first 8,192 tokens at most."""


_LONG_CHARS: Final = 65_536
"""Fewer characters are late only if the component hangs."""


class TextRate:
    """Refuses texts that are predicted to take longer than a deadline. For one event loop.

    A client that repeats such texts, or waits for them, would never get an answer.

    Args:
        deadline_s: Time for all texts of a call.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._fit = LinearFit()

    def check(self, texts: Iterable[str]) -> None:
        """Refuse texts that would take too long. Raises TooLarge."""
        size = _size(texts)
        if self._fit.weight and self._fit.predict(size) > self._deadline_s:
            raise self._too_large(size)

    def observe(self, texts: Iterable[str], seconds: float) -> None:
        """Record the duration of a call."""
        self._fit.observe(_size(texts), seconds)

    def observe_end(self, texts: Iterable[str]) -> None:
        """Record that the deadline has ended a call.

        Raises:
            TooLarge: The texts were too long. Few of them are late for another reason.
        """
        size = _size(texts)
        if size >= _LONG_CHARS:
            self._fit.observe(size, self._deadline_s)
            raise self._too_large(size)

    def _too_large(self, size: int) -> TooLarge:
        at_zero_s, slope = self._fit.fit()
        # A call that the deadline has ended may have needed more time than the fit has of it.
        most = min(size // 2, int((self._deadline_s - at_zero_s) / slope))
        problem = f"have {size} characters, which take longer than {self._deadline_s:g} s"
        return TooLarge("texts", problem, f"send at most {max(1, most)} at once")


def _size(texts: Iterable[str]) -> int:
    return sum(min(len(text), _READ_CHARS) for text in texts)
