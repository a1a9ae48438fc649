"""Shows a client whether a store still runs while the client reads the store's shared memory.

The store publishes its state in a page of shared memory. A connection ends when the store stops.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable

from ragcache_core.identity.keys import VariantKey
from ragcache_kv.transport.framed_transport import DEFERRED_SEND_S
from ragcache_kv.transport.framing import ConnectionBroken, FramedConnection, FrameKind, TimedOut
from ragcache_kv.values.conversions import to_reads

WITHDRAWALS, ALIVE = 0, 1
"""The page's words of 64 bits.

WITHDRAWALS counts how often the store withdrew values that clients may have read. ALIVE is the last
time at which the store reported that it runs, in nanoseconds of time.monotonic's clock, which all
processes of a machine share.
"""

SILENT_S = 2.0
"""After this time without a report, clients ask the store itself. It reports every half second, and
a store that does not run receives no deletes."""


class StatusPageView:
    """A client's read-only view of a store's status page."""

    def __init__(self, fd: int) -> None:
        """Map the page. fd stays the caller's. Raises OSError."""
        page = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._words = memoryview(page).cast("Q")

    @property
    def withdrawals(self) -> int:
        """How often the store withdrew values."""
        return self._words[WITHDRAWALS]

    @property
    def is_silent(self) -> bool:
        """Whether the store's last report is older than SILENT_S."""
        return time.monotonic_ns() - self._words[ALIVE] > SILENT_S * 1e9


class LivenessConnection:
    """A connection without requests. The store's end closes when the store stops.

    The client reports its reads over it. It is separate from the connections with calls: those
    carry replies, and calls that wait for a reply must not wait for each other. Safe for threads.
    """

    def __init__(self, connect: Callable[[float], FramedConnection]) -> None:
        """Keep how to connect.

        Args:
            connect: Connects to this boot of the store by a deadline; raises ConnectionBroken.
        """
        self._connect = connect
        self._lock = threading.Lock()
        self._connection: FramedConnection | None = None
        self._closed = False
        self._reads: list[tuple[VariantKey, float, float]] = []
        self._has_reads = threading.Event()
        self._reporter: threading.Thread | None = None

    def require(self, deadline: float) -> None:
        """Return if the store runs.

        Raises:
            ConnectionBroken: The store cannot be reached by the deadline.
            RagCacheError: The store refused the connection.
        """
        connection = self._connection
        if connection is not None and connection.is_open:
            return
        # The store closes idle connections. It is gone only if a new connection fails.
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimedOut("the deadline has passed")
        try:
            if self._closed:
                raise ConnectionBroken("the transport is closed")
            if self._connection is not None and self._connection is not connection:
                return  # another thread has connected
            if connection is not None:
                connection.close()
                self._connection = None
            self._connection = self._connect(deadline)
        finally:
            self._lock.release()

    def note_read(self, key: VariantKey, fix_overhead: float, seconds: float) -> None:
        """Report a read of a value to the store, soon."""
        self._reads.append((key, fix_overhead, seconds))  # atomic: a lock would delay every read
        if self._reporter is None:
            with self._lock:
                if self._reporter is None and not self._closed:
                    self._reporter = threading.Thread(
                        target=self._report_reads, name="store reads", daemon=True
                    )
                    self._reporter.start()
        if not self._has_reads.is_set():
            self._has_reads.set()

    def close(self) -> None:
        """Close the connection. Reads without a report are lost."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None
        self._has_reads.set()

    def _report_reads(self) -> None:
        while True:
            self._has_reads.wait()
            self._has_reads.clear()
            time.sleep(DEFERRED_SEND_S)
            with self._lock:
                if self._closed:
                    return
                connection = self._connection
            count = len(self._reads)  # other threads may append meanwhile
            reads, self._reads[:count] = self._reads[:count], []
            if connection is None or not reads:
                continue
            connection.deadline = time.monotonic() + DEFERRED_SEND_S
            try:
                connection.send(FrameKind.READS, to_reads(reads))
            except ConnectionBroken:
                connection.close()  # the next call of require notices it
