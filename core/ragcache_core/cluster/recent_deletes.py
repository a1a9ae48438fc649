"""Which documents were deleted lately, so that nothing planned before that is taken up again.

Times are Unix milliseconds, given by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_DELETES = 4096


class RecentDeletes:
    """Remembers the last ones. Where older ones were forgotten, all from before is as deleted."""

    def __init__(self) -> None:
        self._at_ms: dict[str, int] = {}  # by document, the latest last
        self._unknown_to_ms = -1

    def note(self, document: str, at_ms: int) -> None:
        """A document is gone, or some of its text."""
        before = self._at_ms.pop(document, at_ms)
        self._at_ms[document] = max(before, at_ms)
        if len(self._at_ms) > MAX_DELETES:
            oldest = next(iter(self._at_ms))
            self._unknown_to_ms = max(self._unknown_to_ms, self._at_ms.pop(oldest))

    def cover(self, documents: Iterable[str], planned_at_ms: int) -> bool:
        """Whether something of these documents may have been deleted since it was planned."""
        return planned_at_ms <= self._unknown_to_ms or any(
            self._at_ms.get(document, -1) >= planned_at_ms for document in documents
        )
