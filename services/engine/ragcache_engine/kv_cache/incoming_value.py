"""A value on its way from where it is held to a request's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ragcache_core.identity.keys import KVSpace
from ragcache_engine.kv_cache.value_tensors import value_dims, value_shape
from ragcache_engine.protocol.messages import VariantSpan
from ragcache_engine.tiers.local_tiers import OfferedValue
from ragcache_kv.values.stored_value import StoredValue

STORE = "store"
"""Where a value came from that was in no tier."""


class ValueSource(Protocol):
    """A value as [num_layers, 2, num_tokens, num_kv_heads, head_dim], wherever it is."""

    def pieces(self, start: int, end: int) -> Sequence[torch.Tensor]:
        """Its tokens [start, end), in order; for the worker's main thread."""


@dataclass(frozen=True, slots=True)
class NativeValue:
    """A value in a tensor of its own."""

    value: torch.Tensor

    def pieces(self, start: int, end: int) -> Sequence[torch.Tensor]:
        """One."""
        return (self.value[:, :, start:end],)


@dataclass(frozen=True, slots=True)
class EncodedValue:
    """A value that is held with a loss, to be decoded on a GPU, so that fewer bytes go there."""

    stored: StoredValue
    space: KVSpace
    device: torch.device

    def pieces(self, start: int, end: int) -> Sequence[torch.Tensor]:
        """One, decoded; on the device."""
        # Imported here: only a GPU's machine has Triton for sure.
        from ragcache_kv.codecs.device import decode_part  # noqa: PLC0415

        stored, shape = self.stored, value_shape(self.space)
        raw = torch.frombuffer(stored.value, dtype=torch.uint8).to(self.device)
        num_tokens, precision = stored.info.num_tokens, stored.info.precision
        dims = value_dims(self.space, num_tokens)
        value = torch.empty(dims, dtype=getattr(torch, self.space.dtype), device=self.device)
        begin = 0
        for part, out in zip(stored.parts, value, strict=True):
            encoded = raw[begin : begin + part.num_bytes]
            decode_part(encoded, shape, num_tokens, precision, out)
            begin += part.num_bytes
        return (value[:, :, start:end],)


@dataclass(frozen=True, slots=True)
class IncomingValue:
    """One span's value; source None: it did not come, and unless it is mended nothing after it.

    num_bytes: of the value as it came. came_from: the name of a tier, or STORE. turn: positions by
    which its keys have yet to be moved. offer: for the tiers, once it is written.
    """

    span: VariantSpan
    source: ValueSource | None
    reason: str = ""
    mended: bool = False
    num_bytes: int = 0
    came_from: str = STORE
    turn: int = 0
    offer: OfferedValue | None = None
