"""Plans that are not acted on: how many, and a line of log now and then."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from ragcache_core.errors import RagCacheError

log = logging.getLogger("vllm.ragcache")

SAY_EVERY_S: Final = 10.0
"""Whoever reaches the engine can send as many as they like, and a log has an end."""
_MOST_CHARS: Final = 300
"""Of an error, which may repeat what was sent."""


class Refusal(StrEnum):
    """Why a plan is not acted on, as metrics say it."""

    UNSEALED = "unsealed"
    FORGED = "forged"  # its seal is not a gateway's, or is of another plan or prompt
    INVALID = "invalid"


class RefusedPlans:
    """Counts them; for one thread. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._unsaid = 0
        self._say_from = float("-inf")

    def add(self, request_id: str, why: Refusal, error: Exception | None = None) -> None:
        """Count one more, and say so if nothing was said lately. error: what was found wrong."""
        self._counts[why.value] += 1
        now = self._clock()
        if now < self._say_from:
            self._unsaid += 1
            return
        log.warning(
            "the plan of request %s is %s and dropped%s%s",
            request_id,
            why.value,
            f": {error!s:.{_MOST_CHARS}}" if error else "",
            f"; {self._unsaid} more since the last such line" if self._unsaid else "",
            # What nobody foresaw is ours to look into.
            exc_info=None if isinstance(error, RagCacheError) else error,
        )
        self._unsaid, self._say_from = 0, now + SAY_EVERY_S

    def take(self) -> Counter[str]:
        """How many since the last call, by reason."""
        counts, self._counts = self._counts, Counter()
        return counts
