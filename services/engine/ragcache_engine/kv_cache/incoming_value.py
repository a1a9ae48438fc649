"""Values on their way: from a tier or the store to a request's blocks, and to the tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import VariantInfo
from ragcache_engine.kv_cache.value_tensors import value_dims, value_shape
from ragcache_engine.protocol.messages import STORE_TIER, VariantSpan
from ragcache_kv.values.stored_value import StoredValue


@dataclass(frozen=True, slots=True)
class OfferedValue:
    """A value that is offered to the worker's tiers.

    Attributes:
        key: The variant's key.
        info: The variant, as it was computed.
        num_bytes: Memory that the offer uses until a tier has copied the value.
        domain: Access domain.
        native: Returns the value, [num_layers, 2, num_tokens, num_kv_heads, head_dim] on the CPU.
            None: the value could not be made.
    """

    key: VariantKey
    info: VariantInfo
    num_bytes: int
    domain: str
    native: Callable[[], torch.Tensor | None]


class ValueSource(Protocol):
    """A value as [num_layers, 2, num_tokens, num_kv_heads, head_dim], in any memory."""

    def pieces(self, start: int, end: int) -> Sequence[torch.Tensor]:
        """Return tokens [start, end), in order. Only the worker's main thread calls this."""


@runtime_checkable
class LeasedSource(ValueSource, Protocol):
    """A source whose bytes belong to a tier, which keeps them unchanged until ``close``."""

    def close(self) -> None:
        """Return the bytes to the tier, when the device no longer reads them."""


@dataclass(frozen=True, slots=True)
class NativeValue:
    """A value in a tensor of its own."""

    value: torch.Tensor

    def pieces(self, start: int, end: int) -> Sequence[torch.Tensor]:
        """Return tokens [start, end) as one piece."""
        return (self.value[:, :, start:end],)


@dataclass(frozen=True, slots=True)
class EncodedValue:
    """A value in a lossy codec, which a GPU decodes, so that fewer bytes are copied to it."""

    stored: StoredValue
    space: KVSpace
    device: torch.device

    def pieces(self, start: int, end: int) -> Sequence[torch.Tensor]:
        """Decode the value on the device; return tokens [start, end) as one piece."""
        # Imported here: only a machine with a GPU is sure to have Triton.
        from ragcache_kv.codecs.device import decode_part  # noqa: PLC0415

        stored, shape = self.stored, value_shape(self.space)
        raw = torch.frombuffer(stored.value, dtype=torch.uint8)
        raw = raw.to(self.device, non_blocking=True)
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
    """One span's value, or the reason why it did not arrive."""

    span: VariantSpan
    # None: the value did not arrive.
    source: ValueSource | None
    reason: str = ""
    # If not, no value after one that did not arrive can be used.
    can_recompute: bool = False
    # Size of the value as it arrived.
    num_bytes: int = 0
    # One of the worker's tiers, or STORE_TIER.
    tier: str = STORE_TIER
    # Positions by which the writer must rotate the keys.
    rotate_by: int = 0
    # For the worker's tiers, after the value has been written.
    offer: OfferedValue | None = None
