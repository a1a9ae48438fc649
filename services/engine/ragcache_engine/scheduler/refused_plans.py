"""Counts the plans that the connector refuses, and logs some of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from ragcache_core.errors import RagCacheError

log = logging.getLogger("vllm.ragcache")

LOG_INTERVAL_S: Final = 10.0
"""At most one log line in this time: any client of the engine can send refused plans."""
_MAX_ERROR_CHARS: Final = 300
"""An error may repeat what the client sent."""


class RefusalReason(StrEnum):
    """Why the connector refuses a plan. The values are labels of a metric."""

    UNSIGNED = "unsigned"
    FORGED = "forged"  # the signature is not a gateway's, or belongs to another plan or prompt
    INVALID = "invalid"


class RefusedPlans:
    """Counts refused plans. Not thread-safe.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._num_unlogged = 0
        self._next_log_s = float("-inf")

    def add(self, request_id: str, reason: RefusalReason, error: Exception | None = None) -> None:
        """Count one more refused plan, and log it unless another was logged just before."""
        self._counts[reason.value] += 1
        now = self._clock()
        if now < self._next_log_s:
            self._num_unlogged += 1
            return
        log.warning(
            "scheduler: plan refused request=%s reason=%s%s%s",
            request_id,
            reason.value,
            f" error={error!s:.{_MAX_ERROR_CHARS}}" if error else "",
            f" since_last_line={self._num_unlogged}" if self._num_unlogged else "",
            # Log a traceback for errors that are not ours.
            exc_info=None if isinstance(error, RagCacheError) else error,
        )
        self._num_unlogged, self._next_log_s = 0, now + LOG_INTERVAL_S

    def take(self) -> Counter[str]:
        """Return how many plans were refused since the last call, by reason."""
        counts, self._counts = self._counts, Counter()
        return counts
