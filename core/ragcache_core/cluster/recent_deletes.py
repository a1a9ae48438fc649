"""Recently deleted documents, so that work that was planned before a delete is not resumed.

The caller passes times as Unix milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_DELETES = 4096


class RecentDeletes:
    """Remembers the last MAX_DELETES deletes.

    Once older deletes are forgotten, everything planned before them counts as deleted.
    """

    def __init__(self) -> None:
        self._deleted_at_ms: dict[str, int] = {}  # by document, the latest last
        self._unknown_until_ms = -1

    def record(self, document: str, at_ms: int) -> None:
        """Record that a document was deleted or changed."""
        before = self._deleted_at_ms.pop(document, at_ms)
        self._deleted_at_ms[document] = max(before, at_ms)
        if len(self._deleted_at_ms) > MAX_DELETES:
            oldest = next(iter(self._deleted_at_ms))
            self._unknown_until_ms = max(self._unknown_until_ms, self._deleted_at_ms.pop(oldest))

    def record_all(self, at_ms: int) -> None:
        """Record that any document may have been deleted or changed."""
        self._unknown_until_ms = max(self._unknown_until_ms, at_ms)

    def may_include(self, documents: Iterable[str], planned_at_ms: int) -> bool:
        """Whether one of these documents may have been deleted since planned_at_ms."""
        return planned_at_ms <= self._unknown_until_ms or any(
            self._deleted_at_ms.get(document, -1) >= planned_at_ms for document in documents
        )
