"""Cache context impact: how much a chunk's KV depends on the chunks before it.

Template text before the chunks of every prompt may be counted as one more chunk (footnote of
section 2.2) or be left out, in the same way here and in ``prefix_overlap``. This module leaves it
out: the template never mismatches. The first tokens of a prompt also draw much attention (a sink).
Eq. 9 divides by the few tokens of a template, so it would give every chunk an impact near 1.

Source: Cache-Craft section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ragcache_core.blend.prefix_chunks import AttendedChunk

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
