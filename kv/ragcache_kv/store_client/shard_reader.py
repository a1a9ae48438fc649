"""Reads the values of one shard, on the caller's thread or ahead of it on another one."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_kv.store_client.client import SERVICE
from ragcache_kv.store_client.shard import RETRY_S
from ragcache_kv.values.stored_value import ValueOrMiss
from ragcache_wire.status import NoAnswer

VALUES_AHEAD = 2
"""Values of each shard that may wait for the caller while it reads several shards."""

KeyedValue = tuple[VariantKey, ValueOrMiss]


class ShardReader:
    """Reads one shard's values in order. Its context ends the call.

    Without a pool, the caller's thread reads. With one, a thread of the pool reads ahead.
    """

    def __init__(
        self, begin: Callable[[], Iterator[KeyedValue]], pool: ThreadPoolExecutor | None
    ) -> None:
        """Start to read.

        Args:
            begin: Makes the call.
            pool: The threads that read ahead, or None.
        """
        self._stop = threading.Event()
        self._ahead: queue.Queue[ValueOrMiss | BaseException] | None = None
        if pool is None:
            self._values = _lazily(begin)
        else:
            self._ahead = queue.Queue(VALUES_AHEAD)
            # In a copy of the context: the call belongs to the caller's trace.
            pool.submit(copy_context().run, self._read, begin)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._ahead is None:
            _close(self._values)

    def next_value(self, deadline: float) -> ValueOrMiss:
        """Return the next value. Raises the errors of the call.

        Args:
            deadline: Of the call, on the clock of time.monotonic.
        """
        if self._ahead is None:
            return next((value for _, value in self._values), Miss.LOST)
        try:
            # The call ends at its deadline, unless a closed store never started it.
            value = self._ahead.get(timeout=max(0.0, deadline - time.monotonic()) + RETRY_S)
        except queue.Empty as error:
            raise NoAnswer(SERVICE, "the call was not started") from error
        if isinstance(value, BaseException):
            raise value
        return value

    def _read(self, begin: Callable[[], Iterator[KeyedValue]]) -> None:
        try:
            values = begin()
            try:
                for _, value in values:
                    self._hand_over(value)
                    if self._stop.is_set():
                        return
            finally:
                _close(values)
            self._hand_over(NoAnswer(SERVICE, "the call ended early"))
        except BaseException as error:
            self._hand_over(error)

    def _hand_over(self, value: ValueOrMiss | BaseException) -> None:
        assert self._ahead is not None
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._ahead.put(value, timeout=0.1)
                return


def _lazily(begin: Callable[[], Iterator[KeyedValue]]) -> Iterator[KeyedValue]:
    """Make the call when the first value is requested."""
    yield from begin()


def _close(values: Iterator[KeyedValue]) -> None:
    # Only generators have close; other iterators end with their last reference.
    close = getattr(values, "close", None)
    if close is not None:
        close()
