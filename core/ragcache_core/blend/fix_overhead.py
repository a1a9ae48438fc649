"""Cache fix overhead: the share of a chunk to recompute (Cache-Craft sections 3.2, 3.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ragcache_core.identity.keys import VariantKey

MIN_FIX_OVERHEAD = 0.05
"""Lower bound of CFO in 1 / CFO. Below 5 % recomputed tokens a use counts as ideal."""


@dataclass(frozen=True, slots=True)
class VariantFit:
    """How well a variant fits a prompt.

    Attributes:
        cci: Eq. 11, in [0, 1].
        adjusted_overlap: beta' of eq. 8, in [0, 1].
    """

    key: VariantKey
    cci: float
    adjusted_overlap: float

    def __post_init__(self) -> None:
        if not (0 <= self.cci <= 1 and 0 <= self.adjusted_overlap <= 1):
            raise ValueError(
                f"CCI and overlap must be in [0, 1], not {self.cci}, {self.adjusted_overlap}"
            )

    @property
    def mismatch(self) -> float:
        """CCI * (1 - beta'), in [0, 1]: what a use of it has to recompute, before alpha."""
        return self.cci * (1.0 - self.adjusted_overlap)

    def fix_overhead(self, alpha: float) -> float:
        """Return CFO = alpha * CCI * (1 - beta') (eq. 12), the share of the tokens to recompute.

        CFO is a share, so it is at most 1 here. Eq. 12 has no such limit for an alpha above 1,
        although the paper goes up to 3.

        Args:
            alpha: Finite, 0 or more. 0 recomputes nothing (naive reuse).
        """
        if not (math.isfinite(alpha) and alpha >= 0):
            raise ValueError(f"alpha must be finite and 0 or more, not {alpha}")
        return min(1.0, alpha * self.mismatch)


def best_variant(fits: Iterable[VariantFit]) -> VariantFit | None:
    """Return the variant with the lowest CCI * (1 - beta'), or None of none.

    Variants are compared before alpha and the limit of CFO, which would make all variants that need
    a full recomputation equal. Ties go to the higher overlap, then to the lower key, in any input
    order.

    Source: Cache-Craft section 3.3.
    """
    return min(
        fits,
        key=lambda fit: (fit.mismatch, -fit.adjusted_overlap, fit.key.to_bytes()),
        default=None,
    )


def frequency_gain(fix_overhead: float, floor: float = MIN_FIX_OVERHEAD) -> float:
    """Return what one use adds to a variant's frequency of reuse: 1 / CFO, in [1, 1 / floor].

    CFO is 0 where the prefix matches, and 1 / 0 would fix all ranks for ever.

    Args:
        fix_overhead: CFO, in [0, 1].
        floor: Lower bound of CFO, in (0, 1].

    Source: Cache-Craft section 3.3.
    """
    if not 0 <= fix_overhead <= 1:
        raise ValueError(f"fix_overhead must be in [0, 1], not {fix_overhead}")
    if not 0 < floor <= 1:
        raise ValueError(f"floor must be in (0, 1], not {floor}")
    return 1.0 / max(floor, fix_overhead)
