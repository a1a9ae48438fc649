"""Whether a store is still there, for a client that reads of its memory without asking."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ragcache_core.identity.keys import VariantKey
from ragcache_kv.transport.framed_transport import DEFER_S
from ragcache_kv.transport.framing import ConnectionBroken, FramedConnection, FrameKind, TimedOut
from ragcache_kv.values.conversions import to_reads


class LivenessConnection:
    """A connection over which nothing is asked: the store's end closes with the store.

    It tells the store what was read without it. Of its own, since one that is asked over has
    answers in it, and calls that wait for one must not wait for each other. Safe for threads.
    """

    def __init__(self, connect: Callable[[float], FramedConnection]) -> None:
        """connect: makes a connection to this start of the store by a deadline; raises ConnectionBroken."""
        self._connect = connect
        self._lock = threading.Lock()
        self._connection: FramedConnection | None = None
        self._closed = False
        self._reads: list[tuple[VariantKey, float]] = []
        self._owing = threading.Event()
        self._payer: threading.Thread | None = None

    def require(self, deadline: float) -> None:
        """Return if the store is there.

        Raises ConnectionBroken if it cannot be reached by deadline; and what the store has raised instead of
        taking one connection more.
        """
        connection = self._connection
        if connection is not None and connection.is_open:
            return
        # Silent for long it was closed; only if there can be no other, the store is gone.
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimedOut("the deadline has passed")
        try:
            if self._closed:
                raise ConnectionBroken("the transport is closed")
            if self._connection is not None and self._connection is not connection:
                return  # made by another thread since
            if connection is not None:
                connection.close()
                self._connection = None
            self._connection = self._connect(deadline)
        finally:
            self._lock.release()

    def note_read(self, key: VariantKey, seconds: float) -> None:
        """Tell the store, soon, that a value was read again."""
        self._reads.append((key, seconds))  # one step: no lock, which every read would wait for
        if self._payer is None:
            with self._lock:
                if self._payer is None and not self._closed:
                    self._payer = threading.Thread(
                        target=self._pay, name="store reads", daemon=True
                    )
                    self._payer.start()
        if not self._owing.is_set():
            self._owing.set()

    def close(self) -> None:
        """End the connection; what was not told yet is not."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None
        self._owing.set()

    def _pay(self) -> None:
        while True:
            self._owing.wait()
            self._owing.clear()
            time.sleep(DEFER_S)
            with self._lock:
                if self._closed:
                    return
                connection = self._connection
            count = len(self._reads)  # more may come meanwhile
            reads, self._reads[:count] = self._reads[:count], []
            if connection is None or not reads:
                continue
            connection.deadline = time.monotonic() + DEFER_S
            try:
                connection.send(FrameKind.READS, to_reads(reads))
            except ConnectionBroken:
                connection.close()  # whoever requires it next sees that
