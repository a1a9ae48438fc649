"""Remembers which rows pass a filter, until documents of its collection change."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.retrieval.filters import Filter, simplified
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import Rows

MAX_BYTES = 64 << 20
"""Most bytes of rows. A million rows take 8 MiB."""
LIMIT_S = 5.0
"""Longest evaluation of a filter. One condition takes about 0.3 s for each million documents."""
_POLL_S = 0.05
"""Time between two questions of a search that waits for another one whether it is cancelled."""

_Key: TypeAlias = tuple[int, Filter]
_Cancelled: TypeAlias = Callable[[], bool]


class FilterCancelled(Exception):
    """The search that wanted the rows was cancelled."""


@dataclass(frozen=True, slots=True)
class _KnownRows:
    """Rows that passed a filter after a number of changes of the generation."""

    rows: Rows
    num_changes: int


@dataclass(slots=True)
class _Evaluation:
    """A filter that one search evaluates for all that wait for it. It ends if all are cancelled.

    Attributes:
        num_changes: Of the generation when it began.
        rows: None until it ends, and if it failed or was cancelled.
    """

    num_changes: int
    waiting: list[_Cancelled]
    has_ended: threading.Event = field(default_factory=threading.Event)
    rows: Rows | None = None
    error: Exception | None = None


class FilterCache:
    """Rows by generation and filter. Any thread may call it.

    The filters of access by key recur in every search, and a broad one passes most rows. Under
    ingestion none of them stays, so searches that want the same rows share one evaluation.
    """

    def __init__(
        self, store: DocumentStore, indexes: GenerationIndexes, max_bytes: int = MAX_BYTES
    ) -> None:
        self._store = store
        self._indexes = indexes
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards the three below
        self._known: OrderedDict[_Key, _KnownRows] = OrderedDict()
        self._num_bytes = 0
        self._running: dict[_Key, _Evaluation] = {}

    def cached(self, generation: int, wanted: Filter) -> Rows | None:
        """Return what ``allowed_rows`` returns if it is known. None: it has to be evaluated."""
        return self._current(
            (generation, simplified(wanted)), self._indexes.num_changes(generation)
        )

    def allowed_rows(
        self, generation: int, wanted: Filter, cancelled: _Cancelled = lambda: False
    ) -> Rows:
        """Return the sorted rows of a generation whose documents pass a filter.

        All changes before the call are seen.

        Args:
            cancelled: Asked every few milliseconds whether the rows are no longer wanted.

        Raises:
            FilterCancelled: ``cancelled`` has returned True.
            InvalidInput: The evaluation takes longer than LIMIT_S.
            Unavailable: The store does not answer.
        """
        key = (generation, simplified(wanted))
        num_changes = self._indexes.num_changes(generation)
        while not cancelled():
            rows = self._current(key, num_changes)
            if rows is not None:
                return rows
            evaluation, is_own = self._joined(key, cancelled)
            if is_own:
                self._evaluate(key, evaluation)
            while not evaluation.has_ended.wait(_POLL_S):
                if cancelled():
                    raise FilterCancelled
            if evaluation.error is not None:
                raise evaluation.error
            if evaluation.rows is not None and evaluation.num_changes >= num_changes:
                return evaluation.rows
            # It began before a change that this search has to see.
        raise FilterCancelled

    def _current(self, key: _Key, num_changes: int) -> Rows | None:
        """Return known rows that reflect a number of changes."""
        with self._lock:
            known = self._known.get(key)
            if known is None or known.num_changes < num_changes:
                return None
            self._known.move_to_end(key)
            return known.rows

    def _joined(self, key: _Key, cancelled: _Cancelled) -> tuple[_Evaluation, bool]:
        """Return the running evaluation, or a new one and True."""
        with self._lock:
            running = self._running.get(key)
            if running is not None:
                running.waiting.append(cancelled)
                return running, False
            started = _Evaluation(self._indexes.num_changes(key[0]), [cancelled])
            self._running[key] = started
            return started, True

    def _evaluate(self, key: _Key, evaluation: _Evaluation) -> None:
        end_s = time.monotonic() + LIMIT_S

        def is_unwanted() -> bool:
            return all(cancelled() for cancelled in evaluation.waiting)

        try:
            evaluation.rows = self._store.allowed_rows(
                *key, lambda: time.monotonic() > end_s or is_unwanted()
            )
        except Unavailable as error:
            if time.monotonic() > end_s:
                evaluation.error = _too_slow()
            elif not is_unwanted():
                evaluation.error = error
        except Exception as error:
            evaluation.error = error
        finally:
            with self._lock:
                del self._running[key]
                if evaluation.rows is not None:
                    self._keep(key, _KnownRows(evaluation.rows, evaluation.num_changes))
            evaluation.has_ended.set()

    def _keep(self, key: _Key, known: _KnownRows) -> None:
        before = self._known.pop(key, None)
        self._num_bytes += known.rows.nbytes - (0 if before is None else before.rows.nbytes)
        self._known[key] = known
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._known.popitem(last=False)[1].rows.nbytes


def _too_slow() -> InvalidInput:
    return InvalidInput(
        "filter",
        f"takes longer than {LIMIT_S:g} s on the documents of this collection",
        "use fewer conditions, or fields and values that fewer documents have",
    )
