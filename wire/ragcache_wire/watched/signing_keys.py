"""The keys that sign plans, in a file that may change, so that rotation needs no restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ragcache_wire.watched.key_lines import KeyLines


class SigningKeys(KeyLines):
    """The keys of a platform. The first one signs, and each one verifies (``plan.signature``)."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(path, "RAGCACHE_SIGNING_KEY_FILE", "signing keys", clock)
