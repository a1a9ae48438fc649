"""The pages of a document's text, which form feeds divide."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

PAGE_BREAK: Final = "\f"


class PageBreaks:
    """Where the pages of a text begin. A text without form feeds has no pages.

    Args:
        text: The document's text.
    """

    def __init__(self, text: str) -> None:
        self._breaks: list[int] = []
        at = text.find(PAGE_BREAK)
        while at >= 0:
            self._breaks.append(at)
            at = text.find(PAGE_BREAK, at + 1)

    def pages(self, start: int, end: int) -> tuple[int, int]:
        """Return the first and the last page of text[start:end], from 1; 0 if there are none.

        Args:
            end: After ``start``.
        """
        if not self._breaks:
            return 0, 0
        return 1 + bisect_right(self._breaks, start), 1 + bisect_right(self._breaks, end - 1)
