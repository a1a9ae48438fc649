"""How much longer than predicted requests wait.

A request that is admitted may be overtaken by later ones of better bands, and by those of tenants
below their share. A new prompt also shares passes with those before it. So under overload half of
the admitted requests would exceed a limit that their predictions just meet. The factor that
``COVERED_SHARE`` of the waits keep is learned instead.

Source: stochastic approximation of a quantile (Robbins and Monro, 1951), of the logarithm.
"""

from __future__ import annotations

import math
from typing import Final

COVERED_SHARE: Final = 0.9
"""Share of requests that wait at most so long as is predicted with the factor."""

MAX_FACTOR: Final = 4.0

_STEP: Final = 0.1
_LEAST_SHARE_OF_WORK: Final = 0.5


class QueueError:
    """The factor of one tenant in a band. It starts at 1, and right predictions bring it back."""

    def __init__(self) -> None:
        self._log_factor = 0.0

    @property
    def factor(self) -> float:
        """What a predicted wait is multiplied by; from 1 to ``MAX_FACTOR``."""
        return math.exp(self._log_factor)

    def observe(self, predicted_s: float, took_s: float, work_s: float) -> None:
        """Learn from a request that has its first token.

        Args:
            predicted_s: Wait that was predicted, without the factor. A short one is ignored: it
                says nothing of queues.
            took_s: From when it was sent to its first token.
            work_s: Predicted, of its load and its prefill.
        """
        if predicted_s < _LEAST_SHARE_OF_WORK * work_s or predicted_s <= 0:
            return
        is_covered = took_s - work_s <= self.factor * predicted_s
        step = -_STEP * (1 - COVERED_SHARE) if is_covered else _STEP * COVERED_SHARE
        self._log_factor = min(max(0.0, self._log_factor + step), math.log(MAX_FACTOR))
