"""Keeps the pauses of Python's garbage collector short in a process with many objects.

A full collection visits every object. After the imports of a service that takes about 0.1 s, and
with a knowledge tree of a million nodes seconds, in which the event loop does nothing else.

So what is there at the start is never visited again, and neither is what survives a long
collection. These objects are still freed when the last reference to them goes; only cycles among
them are not. Long collections come from growth, and not from requests, so that such cycles are few.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Final

LONG_PAUSE_S: Final = 0.01
"""CPU time. A pause of this length delays a stream of 20 tokens/s by a fifth of a token."""
_FULL = 2


class LongCollectionFreezer:
    """Exempts what survives a long full collection from later ones; a callback of ``gc``.

    Args:
        clock_s: CPU time of the thread, so that a busy machine makes no pause long.
        freeze: Exempts all objects that are there.
    """

    def __init__(
        self,
        clock_s: Callable[[], float] = time.thread_time,
        freeze: Callable[[], None] = gc.freeze,
    ) -> None:
        self._clock_s = clock_s
        self._freeze = freeze
        self._started_s = 0.0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """Take the start or the end of a collection."""
        if info["generation"] != _FULL:
            return
        if phase == "start":
            self._started_s = self._clock_s()
        elif self._clock_s() - self._started_s > LONG_PAUSE_S:
            self._freeze()


def keep_collections_short() -> None:
    """Exempt all present objects from collections, and limit the later ones.

    A service calls it once, when it is about to serve.
    """
    gc.collect()
    gc.freeze()
    gc.callbacks.append(LongCollectionFreezer())
