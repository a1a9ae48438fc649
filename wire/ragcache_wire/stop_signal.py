"""What SIGTERM does while a service starts."""

from __future__ import annotations

import os
import signal
from types import FrameType


def end_on_stop() -> None:
    """End the process at once on SIGTERM, until another handler takes the place of this one.

    Linux drops signals without a handler for the first process of a container. A service calls this
    first, so that a stop is not lost while it opens its files. Nothing is in flight then.
    """
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, _: FrameType | None) -> None:
    # Not by an exception: an event loop would wait for its threads, which may read files for long.
    os._exit(128 + number)  # as shells report it
