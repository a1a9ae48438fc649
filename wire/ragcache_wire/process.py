"""What every service does to its process: it ends on SIGTERM, and collects garbage in short pauses.

A full collection visits every object. After the imports of a service that takes about 0.1 s, and
with a knowledge tree of a million nodes seconds, in which the event loop does nothing else.

So what is there at the start is never visited again, and neither is what survives a full collection
once that is much. These objects are still freed when the last reference to them goes; only cycles
among them are not. So many objects come from growth, and not from requests: freezing at each long
collection instead would also keep the cycles of the requests that happen to run.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Final


def end_on_stop() -> None:
    """End the process at once on SIGTERM, until another handler takes the place of this one.

    Linux drops signals without a handler for the first process of a container. A service calls this
    first, so that a stop is not lost while it opens its files. Nothing is in flight then.
    """
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, _: FrameType | None) -> None:
    # Not by an exception: an event loop would wait for its threads, which may read files for long.
    os._exit(128 + number)  # as shells report it


MAX_SURVIVORS: Final = 100_000
"""Objects that may survive a full collection and be visited by the next one, for about 10 ms. A
pause of this length delays a stream of 20 tokens/s by a fifth of a token."""
_FULL = 2


class SurvivorFreezer:
    """Exempts what survives full collections from later ones; a callback of ``gc``.

    Args:
        count: Returns how many objects full collections visit.
        freeze: Exempts all objects that are there.
    """

    def __init__(
        self,
        count: Callable[[], int] = lambda: len(gc.get_objects(generation=_FULL)),
        freeze: Callable[[], None] = gc.freeze,
    ) -> None:
        self._count = count
        self._freeze = freeze

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """Take the start or the end of a collection."""
        if phase == "stop" and info["generation"] == _FULL and self._count() > MAX_SURVIVORS:
            self._freeze()


def keep_collections_short() -> None:
    """Exempt all present objects from collections, and limit the later ones.

    A service calls it once, when it is about to serve.
    """
    gc.collect()
    gc.freeze()
    gc.callbacks.append(SurvivorFreezer())
