"""The chunks before a chunk, in the prompt and when its variant was computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ragcache_core.identity.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class PrefixChunk:
    """A chunk before another one in the current prompt. num_tokens: at least 1."""

    chunk: ChunkKey
    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, not {self.num_tokens}")


@dataclass(frozen=True, slots=True)
class AttendedChunk:
    """A chunk C_j before C_i when a variant of C_i was computed, and its attention score.

    Eq. 3 has its indices the other way round, which a causal mask makes 0. Eq. 5, 6 and 14 need the
    queries of the later chunk on the keys of the earlier chunk.

    Attributes:
        num_tokens: |C_j|, at least 1.
        inter: Inter-attention of eq. 3: the sum of attention weights from C_i's tokens to C_j's, as
            the mean over layers and heads, in [0, |C_i|].

    Source: Cache-Craft section 3.1.
    """

    chunk: ChunkKey
    num_tokens: int
    inter: float

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, not {self.num_tokens}")
        if not (math.isfinite(self.inter) and self.inter >= 0):
            raise ValueError(f"inter must be finite and 0 or more, not {self.inter}")
