"""How much of a chunk to recompute: its cache context impact, and its cache fix overhead.

The context impact (CCI) is how much a chunk's KV depends on the chunks before it. Template text
before the chunks of every prompt may be counted as one more chunk (footnote of section 2.2) or be
left out, in the same way here and in ``prefix_overlap``. This module leaves it out: the template
never mismatches. The first tokens of a prompt also draw much attention (a sink). Eq. 9 divides by
the few tokens of a template, so it would give every chunk an impact near 1.

The fix overhead (CFO) is the share of a chunk to recompute.

Source: Cache-Craft sections 3.1 to 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ragcache_core.blend.prefix_overlap import AttendedChunk
from ragcache_core.identity.keys import VariantKey

LOWEST_CCI = 0.5
"""CCI of a chunk that paid no attention to the chunks before it."""

HIGHEST_CCI = 1.0
"""CCI of a chunk that paid attention to the chunks before it only."""


@dataclass(frozen=True, slots=True)
class ContextImpact:
    """Normalized attention of a chunk, both 0 or more (eq. 9, 10).

    Attributes:
        inter: Attention to the chunks before it (a).
        intra: Attention to itself (b).
    """

    inter: float
    intra: float

    def __post_init__(self) -> None:
        if not (self.inter >= 0 and self.intra >= 0):
            raise ValueError(f"attention must be 0 or more, not {self.inter} and {self.intra}")

    @property
    def cci(self) -> float:
        """CCI, the sigmoid of inter / intra (eq. 11), in [0.5, 1].

        Neither is negative, so no chunk is below 0.5. A chunk that paid no attention to the chunks
        before it has 0.5, even where it paid none to itself (0 / 0). A chunk that paid none to
        itself alone has 1.
        """
        if self.inter == 0:
            return LOWEST_CCI
        ratio = self.inter / self.intra if self.intra > 0 else math.inf
        return 1.0 / (1.0 + math.exp(-ratio))


def context_impact(num_tokens: int, intra: float, prefix: Iterable[AttendedChunk]) -> ContextImpact:
    """Apply eq. 9 to attention that is already averaged over layers.

    Eq. 10 averages a and b over layers. Both are linear in the sums, and all layers have the same
    lengths. So averaging the sums first gives the same result with one number per chunk instead of
    one per layer.

    Eq. 4 leaves out the attention of a token to itself (k < l). Here it counts, because the outputs
    of eq. 5 contain it, and because one pass with one-hot values measures it too. It makes intra
    slightly higher and CCI slightly lower for all chunks alike, which alpha compensates.

    Args:
        num_tokens: |C_i|, at least 1.
        intra: Sum of attention weights from each token of the chunk to the tokens of the chunk that
            it attends to, as the mean over layers and heads, in [0, num_tokens].
        prefix: The chunks before it; empty for the first chunk.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, not {num_tokens}")
    if not (math.isfinite(intra) and intra >= 0):
        raise ValueError(f"intra must be finite and 0 or more, not {intra}")
    inter = math.fsum(before.inter / (num_tokens * before.num_tokens) for before in prefix)
    return ContextImpact(inter, intra / num_tokens**2)


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
