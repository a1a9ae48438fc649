"""Evaluates filters in threads of its own, and remembers which rows pass them.

The filters of access by key recur in every search, and a broad one passes most rows. Rows stay
known until documents of their generation change. Searches that want the same rows at the same time
share one evaluation: under ingestion no rows stay known for long. The keys that ask take turns
(``scheduling.turns``), so costly filters of one key delay only its own other filters.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TypeAlias

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_core.retrieval.filters import Filter, simplified
from ragcache_core.scheduling.turns import Turns
from ragcache_retriever.knowledge_base.indexes import GenerationIndexes
from ragcache_retriever.store.document_store import DocumentStore
from ragcache_retriever.store.records import Rows
from ragcache_wire.asking import asker

MAX_BYTES = 64 << 20
"""Most bytes of rows. A million rows take 8 MiB."""
NUM_THREADS = 3
"""Filters that are evaluated at once. Searches without a filter never wait for them."""
MOST_OF_ONE = NUM_THREADS - 1
"""Filters of one key that are evaluated at once."""
LIMIT_S = 5.0
"""Longest evaluation of a filter. One condition takes about 0.3 s for each million documents."""
_POLL_S = 0.05
"""Time between two questions of a waiting search whether it is cancelled."""

_Key: TypeAlias = tuple[int, Filter]
_Cancelled: TypeAlias = Callable[[], bool]


class FilterCancelled(Exception):
    """All searches that wanted the rows were cancelled."""


@dataclass(frozen=True, slots=True)
class _KnownRows:
    """Rows that passed a filter, and the version of the generation that they are no older than."""

    rows: Rows
    version: int


@dataclass(slots=True)
class _Evaluation:
    """A filter that is evaluated once for all searches that wait for it.

    Attributes:
        askers: Keys that want the rows, by their names.
        version: Of the generation when it began. None: it has not begun.
    """

    key: _Key
    waiting: list[_Cancelled] = field(default_factory=list)
    askers: set[str] = field(default_factory=set)
    is_taken: bool = False
    version: int | None = None
    rows: Future[Rows] = field(default_factory=Future)


class FilterCache:
    """Rows by generation and filter. Any thread may call it.

    Where several processes change the documents, the store is asked for their version before each
    use.
    """

    def __init__(
        self, store: DocumentStore, indexes: GenerationIndexes, max_bytes: int = MAX_BYTES
    ) -> None:
        self._store = store
        self._indexes = indexes
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(NUM_THREADS, "filter")
        self._is_closed = False
        self._lock = threading.Lock()  # guards the five below
        self._turns: Turns[str, _Evaluation] = Turns(MOST_OF_ONE)
        self._known: OrderedDict[_Key, _KnownRows] = OrderedDict()
        self._num_bytes = 0
        self._current: dict[_Key, _Evaluation] = {}
        self._next: dict[_Key, _Evaluation] = {}
        """Evaluations that begin after the current ones, for searches that came after a change."""

    def request(
        self, generation: int, wanted: Filter, cancelled: _Cancelled = lambda: False
    ) -> Future[Rows]:
        """Return the rows of ``allowed_rows`` when they are known, without waiting for them.

        The caller must not cancel the future, which others share. It raises what ``allowed_rows``
        raises. It is work of the key that asks (``ragcache_wire.asking``).
        """
        key = (generation, simplified(wanted))
        name = asker()
        version = self._version(generation)
        with self._lock:
            known = self._known.get(key)
            if known is not None and known.version == version:
                self._known.move_to_end(key)
                found: Future[Rows] = Future()
                found.set_result(known.rows)
                return found
            if self._is_closed:
                raise Unavailable("retriever", "it is stopping")
            evaluation = self._current.get(key)
            is_next = False
            if evaluation is None:
                evaluation = self._current[key] = _Evaluation(key)
            elif evaluation.version is not None and evaluation.version != version:
                evaluation, is_next = self._next.setdefault(key, _Evaluation(key)), True
            evaluation.waiting.append(cancelled)
            if name not in evaluation.askers:
                evaluation.askers.add(name)
                if not (is_next or evaluation.is_taken):
                    # A second key need not wait for the turn of the first one.
                    self._turns.add(name, evaluation)
                    self._threads.submit(self._work)
            return evaluation.rows

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
        rows = self.request(generation, wanted, cancelled)
        while not cancelled():
            try:
                return rows.result(_POLL_S)
            except FutureTimeout:
                continue
        raise FilterCancelled

    def close(self) -> None:
        """End all evaluations."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=True)

    def _work(self) -> None:
        """Evaluate filters in turns, until none may begin."""
        while True:
            with self._lock:
                turn = self._turns.take(lambda evaluation: not evaluation.is_taken)
                if turn is None:
                    return
                name, evaluation = turn
                evaluation.is_taken = True
            self._evaluate(evaluation)
            with self._lock:
                self._turns.finish(name)

    def _evaluate(self, evaluation: _Evaluation) -> None:
        """Evaluate a filter and tell all that wait. It raises no error."""
        key = evaluation.key
        while True:
            found = self._attempt(evaluation)
            with self._lock:
                if isinstance(found, FilterCancelled) and self._is_wanted(evaluation):
                    continue  # another search has joined since
                following = self._next.pop(key, None)
                if following is None:
                    del self._current[key]
                else:
                    self._current[key] = following
                    for name in sorted(following.askers):
                        self._turns.add(name, following)
                if not isinstance(found, Exception) and evaluation.version is not None:
                    self._keep(key, _KnownRows(found, evaluation.version))
                break
        if isinstance(found, Exception):
            evaluation.rows.set_exception(found)
        else:
            evaluation.rows.set_result(found)

    def _attempt(self, evaluation: _Evaluation) -> Rows | Exception:
        end_s = time.monotonic() + LIMIT_S
        is_wanted = self._is_wanted(evaluation)

        def has_ended() -> bool:
            nonlocal is_wanted
            is_wanted = self._is_wanted(evaluation)
            return not is_wanted or time.monotonic() > end_s

        if not is_wanted:
            return FilterCancelled()
        try:
            # Read before the rows, so that a write in between makes them newer than their version.
            evaluation.version = self._version(evaluation.key[0])
            return self._store.reads.allowed_rows(*evaluation.key, has_ended)
        except Unavailable as error:
            if not is_wanted:
                return FilterCancelled()
            return _too_slow() if time.monotonic() > end_s else error
        except Exception as error:
            return error

    def _version(self, generation: int) -> int:
        version = self._store.reads.rows_version(generation)
        return self._indexes.num_changes(generation) if version is None else version

    def _is_wanted(self, evaluation: _Evaluation) -> bool:
        return not self._is_closed and any(not cancelled() for cancelled in evaluation.waiting)

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
