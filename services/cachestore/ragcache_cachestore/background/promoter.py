"""Brings values from disk into memory in the background: in idle_window, or when asked to at once."""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable

from ragcache_cachestore.background.idle_window import IdleWindow
from ragcache_cachestore.background.threads import END_TIMEOUT_S, end
from ragcache_cachestore.state.catalog import CatalogVariant

log = logging.getLogger(__name__)

THREADS = 2
CAPACITY = 4096
"""Promoter waiting; further ones are not begun, since by their turn they would be of no use."""


class Promoter:
    """Threads that call promote for each variant once, in order."""

    def __init__(self, promote: Callable[[CatalogVariant], None], idle_window: IdleWindow | None = None) -> None:
        self._promote = promote
        self._idle_window = idle_window or IdleWindow()
        self._changed = threading.Condition()
        self._waiting: OrderedDict[int, tuple[CatalogVariant, float]] = OrderedDict()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"promoter-{n}", daemon=True)
            for n in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, variant: CatalogVariant, *, now: bool) -> bool:
        """Queue a variant; False if too many wait already. now: not only in the next pause."""
        with self._changed:
            if len(self._waiting) >= CAPACITY:
                return False
            if now:
                self._waiting[variant.identity] = variant, -math.inf
                self._waiting.move_to_end(variant.identity, last=False)
            else:
                self._waiting.setdefault(variant.identity, (variant, self._idle_window.clock()))
            self._changed.notify_all()
            return True

    def close(self, timeout_s: float = END_TIMEOUT_S) -> bool:
        """Stop; what waits is left where it is. False if what is at hand takes longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return end(self._threads, timeout_s)

    def _run(self) -> None:
        while True:
            variant = self._next()
            if variant is None:
                return
            try:
                self._promote(variant)
            except Exception:
                log.exception("a value could not be brought into memory")

    def _next(self) -> CatalogVariant | None:
        with self._changed:
            while not self._closed:
                if not self._waiting:
                    self._changed.wait()
                    continue
                identity, (variant, since) = next(iter(self._waiting.items()))
                wait_s = self._idle_window.wait_s(since)
                if wait_s <= 0:
                    del self._waiting[identity]
                    return variant
                self._changed.wait(wait_s)
            return None
