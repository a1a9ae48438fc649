"""Brings values from disk into memory in the background, within a bound."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from ragcache_cachestore.catalog import Holding
from ragcache_cachestore.threads import END_TIMEOUT_S, end

log = logging.getLogger(__name__)

THREADS = 2
CAPACITY = 4096
"""Promotions waiting; further ones are not begun, since by their turn they would be of no use."""


class Promotions:
    """Threads that call promote for each holding once, in order."""

    def __init__(self, promote: Callable[[Holding], None]) -> None:
        self._promote = promote
        self._changed = threading.Condition()
        self._waiting: OrderedDict[int, Holding] = OrderedDict()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"promoter-{n}", daemon=True)
            for n in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, holding: Holding) -> bool:
        """Queue a holding; False if too many wait already."""
        with self._changed:
            if len(self._waiting) >= CAPACITY:
                return False
            self._waiting[holding.identity] = holding
            self._changed.notify()
            return True

    def close(self, timeout_s: float = END_TIMEOUT_S) -> bool:
        """Stop; what waits is left where it is. False if what is at hand takes longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return end(self._threads, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                _, holding = self._waiting.popitem(last=False)
            try:
                self._promote(holding)
            except Exception:
                log.exception("a value could not be brought into memory")
