"""Report uses of variants that the store does not see, in batches and in the background.

The store sees what an engine reads from it. It does not see what vLLM's own prefix cache or the
worker's tiers serve, or what the engine computes although it is stored. Without reports, the
hottest variants would look cold to the store and leave first.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ragcache_core.identity.keys import VariantKey
from ragcache_core.store_api import MAX_KEYS, ReportedUses, VariantUse
from ragcache_engine.threads import unpinned_pool

log = logging.getLogger("vllm.ragcache")

PREFIX_CACHE, LOCAL_TIER, COMPUTED = "prefix_cache", "local_tier", "computed"
"""Where the KV came from: vLLM's own prefix cache, a tier of the worker, or a computation although
the variant is stored."""

DROPPED = "dropped"
"""Uses that were not reported: too many variants at once, or no shard to report them to."""

REPORT_EVERY_S = 1.0
MAX_PENDING = MAX_KEYS
"""Different uses that wait for the next report. More are dropped, and counted as such."""


class UseReceiver(Protocol):
    """The part of the store's client that a UseReporter needs."""

    def report_uses(self, reports: Sequence[ReportedUses]) -> int:
        """Report uses. Return how many were counted. Never raises."""


class UseReporter:
    """Collects uses, and sends them once every REPORT_EVERY_S while there are any. Thread-safe.

    No method waits for the store.
    """

    def __init__(
        self,
        store: UseReceiver,
        every_s: float = REPORT_EVERY_S,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._store = store
        self._every_s = every_s
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._pending: Counter[tuple[VariantKey, VariantUse]] = Counter()
        self._counts: Counter[str] = Counter()
        self._scheduled = False
        self._closed = threading.Event()
        self._pool = unpinned_pool(1, "ragcache-uses")

    def note(self, source: str, uses: Iterable[tuple[VariantKey, VariantUse]]) -> None:
        """Queue uses for the next report.

        Args:
            source: Where the KV came from, for metrics.
            uses: Variants, with how a request used each.
        """
        with self._lock:
            for one in uses:
                if one not in self._pending and len(self._pending) >= self._max_pending:
                    self._counts[DROPPED] += 1
                    continue
                self._pending[one] += 1
                self._counts[source] += 1
            if self._pending and not self._scheduled:
                # Without a thread, the next use tries again. After close there is no next report.
                with contextlib.suppress(RuntimeError):
                    self._pool.submit(self._report)
                    self._scheduled = True

    def take_counts(self) -> Mapping[str, int]:
        """Return the uses since the last call, by source, and those that were dropped."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def close(self) -> None:
        """Stop. What is pending is not reported."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _report(self) -> None:
        with self._lock:
            if not self._scheduled:  # the pool has queued it although no thread could start
                return
        if self._closed.wait(self._every_s):
            return
        with self._lock:
            self._scheduled = False
            pending, self._pending = self._pending, Counter()
        reports = [ReportedUses(key, use, times) for (key, use), times in pending.items()]
        try:
            self._store.report_uses(reports)
        except Exception:
            log.exception("use reporter: report failed")
