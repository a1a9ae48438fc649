"""A thread that does a store's housekeeping: each duty at its own pace."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from ragcache_cachestore.background.threads import END_TIMEOUT_S, end
from ragcache_core.errors import Unavailable

log = logging.getLogger(__name__)


class Sweeper:
    """Does duties, each (every so many seconds, what). The first is also done when woken."""

    def __init__(
        self, clock: Callable[[], float], duties: Sequence[tuple[float, Callable[[], None]]]
    ) -> None:
        self._clock = clock
        self._duties = duties
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Do the first duty soon."""
        self._wake.set()

    def close(self, timeout_s: float = END_TIMEOUT_S) -> bool:
        """End after the duty at hand; False if that takes longer."""
        self._closing.set()
        self._wake.set()
        return end([self._thread], timeout_s)

    def _run(self) -> None:
        done_at = [self._clock()] * len(self._duties)
        while True:
            self._wake.wait(self._duties[0][0])
            self._wake.clear()
            if self._closing.is_set():
                return
            done_at[0] = float("-inf")
            for index, (every_s, duty) in enumerate(self._duties):
                if self._clock() - done_at[index] >= every_s:
                    done_at[index] = self._clock()
                    self._do(duty)

    @staticmethod
    def _do(duty: Callable[[], None]) -> None:
        try:
            duty()
        except Unavailable as error:
            log.warning("housekeeping waits: %s", error)
        except Exception:
            log.exception("housekeeping failed")
