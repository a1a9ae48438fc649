"""Cache context impact: how much a chunk's KV leans on what was before it (Cache-Craft §3.1).

Template text that stands before the chunks of every prompt may be counted as one more chunk (the
footnote of §2.2), or be left out, but in the same way here and in ``prefix_overlap``. Left out is
better: it never mismatches, and the first tokens of a prompt draw so much attention (a sink) that
eq. 9, which divides by the few tokens of a template, would give every chunk an impact near 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ragcache_core.blend.prefix_chunks import AttendedChunk


@dataclass(frozen=True, slots=True)
class ContextImpact:
    """Normalised attention of a chunk, both 0 or more (eq. 9, 10).

    inter: to the chunks before it (a). intra: to itself (b).
    """

    inter: float
    intra: float

    def __post_init__(self) -> None:
        if not (self.inter >= 0 and self.intra >= 0):
            raise ValueError(f"attention is 0 or more, not {self.inter} and {self.intra}")

    @property
    def cci(self) -> float:
        """CCI, the sigmoid of inter / intra (eq. 11), in [0.5, 1].

        As neither is below 0, no chunk is below 0.5. A chunk that paid nothing to what was before
        it has 0.5, also where it paid nothing to itself (0 / 0); one that paid nothing to itself
        alone has 1.
        """
        if self.inter == 0:
            return 0.5
        ratio = self.inter / self.intra if self.intra > 0 else math.inf
        return 1.0 / (1.0 + math.exp(-ratio))


def context_impact(num_tokens: int, intra: float, prefix: Iterable[AttendedChunk]) -> ContextImpact:
    """Eq. 9 on attention that is already averaged over layers.

    num_tokens: |C_i|, 1 or more. intra: sum of attention weights from each token of the chunk to
    those of the chunk that it sees, as the mean over layers and heads; in [0, num_tokens].
    prefix: the chunks that were before it; none for a chunk that came first.

    Eq. 10 averages a and b over layers. Both are linear in the sums, and the lengths are those of
    every layer, so averaging the sums first gives the same and keeps one number per chunk instead
    of one per layer.

    Eq. 4 leaves out a token's attention to itself (k < l). Here it counts: the outputs of eq. 5
    are made of it too, and one pass with one-hot values measures it along with the rest. It makes
    intra a little higher and CCI a little lower for all chunks alike, which alpha takes up.
    """
    if num_tokens < 1:
        raise ValueError(f"a chunk has 1 token or more, not {num_tokens}")
    if not (math.isfinite(intra) and intra >= 0):
        raise ValueError(f"intra-attention is finite and 0 or more, not {intra}")
    inter = math.fsum(before.inter / (num_tokens * before.num_tokens) for before in prefix)
    return ContextImpact(inter, intra / num_tokens**2)
