"""A value that a worker's tiers may store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import VariantInfo


@dataclass(frozen=True, slots=True)
class OfferedValue:
    """A value that is offered to the worker's tiers.

    Attributes:
        key: The variant's key.
        num_tokens: Length of the chunk.
        num_bytes: Memory that the offer uses until a tier has copied the value.
        base_position: Position of the first token when it was computed.
        serves_exact: Whether the value may serve ``exact`` reuse (``VariantInfo.serves_exact``).
        domain: Access domain.
        native: Returns the value, [num_layers, 2, num_tokens, num_kv_heads, head_dim] on the CPU.
            None: the value could not be made.
    """

    key: VariantKey
    num_tokens: int
    num_bytes: int
    base_position: int
    serves_exact: bool
    domain: str
    native: Callable[[], torch.Tensor | None]

    @classmethod
    def from_info(
        cls,
        key: VariantKey,
        info: VariantInfo,
        num_bytes: int,
        domain: str,
        native: Callable[[], torch.Tensor | None],
    ) -> OfferedValue:
        """Build the offer of a variant that came from a store or was computed here."""
        base, exact = info.base_position, info.serves_exact
        return cls(key, info.num_tokens, num_bytes, base, exact, domain, native)
