"""What the models know before they have seen a search. See bench/support/finality_prior.py."""

from __future__ import annotations

from typing import Final

MEANS: Final = (0.0,) * 14
DEVIATIONS: Final = (1.0,) * 14
FINAL_WEIGHTS: Final = (0.0,) * 15
RECALL_WEIGHTS: Final = (0.0,) * 15
