"""Copies values from disk into memory in the background, in idle windows or at once."""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable

from ragcache_cachestore.background.threads import JOIN_TIMEOUT_S, IdleWindow, join_all
from ragcache_cachestore.state.catalog import CatalogVariant

log = logging.getLogger(__name__)

THREADS = 2
CAPACITY = 4096
"""Bound of the queued promotions. A later one would come too late to be useful."""


class Promoter:
    """Threads that call promote once for each queued variant, in order."""

    def __init__(
        self, promote: Callable[[CatalogVariant], None], idle_window: IdleWindow | None = None
    ) -> None:
        self._promote = promote
        self._idle_window = idle_window or IdleWindow()
        self._changed = threading.Condition()
        self._queue: OrderedDict[int, tuple[CatalogVariant, float]] = OrderedDict()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"promoter-{n}", daemon=True)
            for n in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, variant: CatalogVariant, *, now: bool) -> bool:
        """Queue a variant. Return False if the queue is full.

        Args:
            now: Promote it next, without waiting for an idle window.
        """
        with self._changed:
            if len(self._queue) >= CAPACITY:
                return False
            if now:
                self._queue[variant.identity] = variant, -math.inf
                self._queue.move_to_end(variant.identity, last=False)
            else:
                self._queue.setdefault(variant.identity, (variant, self._idle_window.clock()))
            self._changed.notify_all()
            return True

    def close(self, timeout_s: float = JOIN_TIMEOUT_S) -> bool:
        """Stop after the current promotions. Return False if they take longer than timeout_s."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return join_all(self._threads, timeout_s)

    def _run(self) -> None:
        while (variant := self._next()) is not None:
            try:
                self._promote(variant)
            except Exception:
                log.exception("memory tier: promotion failed")

    def _next(self) -> CatalogVariant | None:
        with self._changed:
            while not self._closed:
                if not self._queue:
                    self._changed.wait()
                    continue
                identity, (variant, queued_at) = next(iter(self._queue.items()))
                wait_s = self._idle_window.wait_s(queued_at)
                if wait_s <= 0:
                    del self._queue[identity]
                    return variant
                self._changed.wait(wait_s)
            return None
