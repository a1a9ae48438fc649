"""The chunks before a chunk: those of a prompt, and those that a variant was captured after."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ragcache_core.identity.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class PrefixChunk:
    """A chunk before another one in the prompt at hand. num_tokens: 1 or more."""

    chunk: ChunkKey
    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"a chunk has 1 token or more, not {self.num_tokens}")


@dataclass(frozen=True, slots=True)
class AttendedChunk:
    """A chunk C_j before a variant of C_i when that was captured, and the attention it was paid.

    num_tokens: |C_j|, 1 or more.
    inter: inter-attention of eq. 3 (Cache-Craft §3.1), the sum of attention weights from C_i's
    tokens to C_j's, as the mean over layers and heads; in [0, |C_i|]. Eq. 3 has its indices the
    other way round, which a causal mask makes 0: the later chunk's queries on the earlier chunk's
    keys are what eq. 5, 6 and 14 need.
    """

    chunk: ChunkKey
    num_tokens: int
    inter: float

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"a chunk has 1 token or more, not {self.num_tokens}")
        if not (math.isfinite(self.inter) and self.inter >= 0):
            raise ValueError(f"inter-attention is finite and 0 or more, not {self.inter}")
