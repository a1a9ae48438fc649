"""One shard of the cache store: its client, whether it answers, and the values read from it.

Values are read on the caller's thread, or ahead of it on another one.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.identity.variant import Miss, Precision
from ragcache_kv.store_client.client import LOOKUP_TIMEOUT_S, StoreClient
from ragcache_kv.transport.transport import SERVICE
from ragcache_kv.values.stored_value import ValueOrMiss
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.status import NoAnswer

log = logging.getLogger("ragcache.store")

RETRY_S = 1.0
"""Time between two attempts to reach a lost shard."""


class Shard:
    """A shard, and what the client knows of it.

    Attributes:
        address: "host:port".
        client: Its client.
        num_users: Calls that need its channel open.
        outstanding_bytes: Size of the values that were requested from it and have not arrived.
        is_removed: Whether it is no member any more.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials = NO_CREDENTIALS,
        store_key: StoreKey | None = None,
        encodings: Sequence[Precision] = (),
    ) -> None:
        self.address = address
        self.client = StoreClient(
            address, credentials=credentials, store_key=store_key, encodings=encodings
        )
        self.num_users = 0
        self.outstanding_bytes = 0
        self.is_removed = False
        self._lock = threading.Lock()
        self._lost = False
        self._checking = False
        self._closed = threading.Event()

    @property
    def is_available(self) -> bool:
        """Whether calls may use it. A lost shard gets no calls, so that none waits for it."""
        return not self._lost

    def note_failure(self, error: RagCacheError, timeout_s: float) -> None:
        """Record a failed call.

        After a call without an answer the shard is lost, and probed in the background until it
        answers. If the call had less than RETRY_S, the shard is only probed.

        Args:
            error: The error of the call.
            timeout_s: The time that the call had.
        """
        if not isinstance(error, NoAnswer):
            log.warning("shard %s: call failed error=%s", self.address, error)
        elif timeout_s >= RETRY_S:
            self._mark_lost(error)
        else:
            self._check()

    def close(self) -> None:
        """Close its channel."""
        self._closed.set()
        self.client.close()

    def _mark_lost(self, error: RagCacheError) -> None:
        with self._lock:
            if self._lost or self._closed.is_set():
                return
            self._lost = True
        log.warning("shard %s: lost, its chunks are misses error=%s", self.address, error)
        name = f"probe of {self.address}"
        threading.Thread(target=self._probe_until_it_answers, name=name, daemon=True).start()

    def _check(self) -> None:
        with self._lock:
            if self._lost or self._checking or self._closed.is_set():
                return
            self._checking = True
        name = f"check of {self.address}"
        threading.Thread(target=self._probe_once, name=name, daemon=True).start()

    def _probe_once(self) -> None:
        try:
            self.client.lookup((), LOOKUP_TIMEOUT_S)
        except NoAnswer as error:
            self._mark_lost(error)
        except Exception as error:  # any other error is an answer
            log.warning("shard %s: probe failed error=%s", self.address, error)
        finally:
            self._checking = False

    def _probe_until_it_answers(self) -> None:
        while not self._closed.wait(RETRY_S):
            try:
                self.client.lookup((), LOOKUP_TIMEOUT_S)
            except RagCacheError:
                continue
            except Exception:  # keep probing: no other thread does
                log.exception("shard %s: probe failed", self.address)
                continue
            self._lost = False
            log.info("shard %s: available again", self.address)
            return


def lost_error(shards: Iterable[Shard]) -> Unavailable:
    """Return the error of a call whose shards are all lost."""
    names = sorted({shard.address for shard in shards})
    return Unavailable(SERVICE, f"shard {', '.join(names)} is lost", RETRY_S)


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
