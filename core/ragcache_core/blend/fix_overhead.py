"""Cache fix overhead: the share of a chunk's tokens to recompute (Cache-Craft §3.2, §3.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ragcache_core.identity.keys import VariantKey

MIN_FIX_OVERHEAD = 0.05
"""Below 5 % recomputed tokens a use is as good as it can be: the floor of 1 / CFO."""


@dataclass(frozen=True, slots=True)
class VariantFit:
    """How well a variant fits a prompt.

    cci: eq. 11. adjusted_overlap: beta' of eq. 8. Both in [0, 1].
    """

    key: VariantKey
    cci: float
    adjusted_overlap: float

    def __post_init__(self) -> None:
        if not (0 <= self.cci <= 1 and 0 <= self.adjusted_overlap <= 1):
            raise ValueError(
                f"CCI and overlap lie in [0, 1], not {self.cci}, {self.adjusted_overlap}"
            )

    @property
    def mismatch(self) -> float:
        """CCI * (1 - beta'), in [0, 1]: what a use of it has to mend, before alpha."""
        return self.cci * (1.0 - self.adjusted_overlap)

    def fix_overhead(self, alpha: float) -> float:
        """CFO = alpha * CCI * (1 - beta') (eq. 12), a share of the chunk's tokens, in [0, 1].

        alpha: finite, 0 or more; 0 recomputes nothing (naive reuse). As CFO is a share, it stops
        at 1, which eq. 12 does not for an alpha above 1 (the paper goes to 3).
        """
        if not (math.isfinite(alpha) and alpha >= 0):
            raise ValueError(f"alpha is finite and 0 or more, not {alpha}")
        return min(1.0, alpha * self.mismatch)


def best_variant(fits: Iterable[VariantFit]) -> VariantFit | None:
    """The variant with the lowest CCI * (1 - beta') (§3.3); None of none.

    Compared before alpha and its bound, under which those that want all recomputed would be equal.
    Ties go to the higher overlap, then to the lower key, whatever the order they come in.
    """
    return min(
        fits,
        key=lambda fit: (fit.mismatch, -fit.adjusted_overlap, fit.key.to_bytes()),
        default=None,
    )


def frequency_gain(fix_overhead: float, floor: float = MIN_FIX_OVERHEAD) -> float:
    """What one use adds to a variant's frequency of reuse: 1 / CFO (§3.3), in [1, 1 / floor].

    fix_overhead: CFO, in [0, 1]. floor: in (0, 1]. CFO is 0 where the prefix matches, and 1 / 0
    would settle all ranks for ever.
    """
    if not 0 <= fix_overhead <= 1:
        raise ValueError(f"CFO lies in [0, 1], not {fix_overhead}")
    if not 0 < floor <= 1:
        raise ValueError(f"the floor lies in (0, 1], not {floor}")
    return 1.0 / max(floor, fix_overhead)
