"""Convert chunks' KV between tensors and the bytes that a store holds."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch

from ragcache_core.identity.keys import KVSpace
from ragcache_core.identity.variant import Precision, ValueShape
from ragcache_engine.kv_cache.host_memory import empty_pinned
from ragcache_kv.values.layout import FORMAT, value_bytes
from ragcache_kv.values.stored_value import StoredValue

log = logging.getLogger("vllm.ragcache")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def value_shape(space: KVSpace) -> ValueShape:
    """Return the shape of one token's KV."""
    return ValueShape(space.num_layers, space.num_kv_heads, space.head_dim, space.dtype)


def native_bytes(value: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return _bytes(value).data.cast("B")


def value_dims(space: KVSpace, num_tokens: int) -> tuple[int, int, int, int, int]:
    """Return [num_layers, 2, num_tokens, num_kv_heads, head_dim]."""
    return (space.num_layers, 2, num_tokens, space.num_kv_heads, space.head_dim)


def matches_space(stored: StoredValue, num_tokens: int, space: KVSpace) -> bool:
    """Tell whether a value declares this length, this space and the format of this version."""
    if stored.value_format != FORMAT or stored.shape != value_shape(space):
        return False
    return stored.info.num_tokens == num_tokens and len(stored.parts) == space.num_layers


def decode(
    stored: StoredValue, num_tokens: int, space: KVSpace, *, pinned: bool = False
) -> torch.Tensor | None:
    """Return a value as [num_layers, 2, num_tokens, num_kv_heads, head_dim].

    The client verified the value's checksums when it received the bytes. A native value is not
    copied.

    Args:
        stored: The value.
        num_tokens: Tokens that it should have.
        space: The KV space that it should have.
        pinned: Whether a value that is not native is decoded to pinned memory.

    Returns:
        None if the value has another layout.
    """
    if not matches_space(stored, num_tokens, space):
        return None
    dims = value_dims(space, num_tokens)
    if stored.info.precision != Precision():
        dtype = DTYPES[space.dtype]
        value = empty_pinned(dims, dtype) if pinned else torch.empty(dims, dtype=dtype)
        return _decoded(stored, value_shape(space), value)
    if len(stored.value) != value_bytes(space, num_tokens):
        return None
    return torch.frombuffer(stored.value, dtype=DTYPES[space.dtype]).view(dims)


def rounded_to(precision: Precision, value: torch.Tensor, space: KVSpace) -> torch.Tensor:
    """Return a copy of a value, [num_layers, 2, num_tokens, ...], as a store re-encodes it."""
    # Imported here as in _decoded.
    from ragcache_kv.codecs import decode_part, encode_part  # noqa: PLC0415

    shape, num_tokens = value_shape(space), value.shape[2]
    rounded = torch.empty_like(value)
    for layer, out in zip(value, rounded, strict=True):
        encoded = encode_part(_bytes(layer).reshape(-1), shape, num_tokens, precision)
        decode_part(encoded, shape, num_tokens, precision, out=_bytes(out).reshape(-1))
    return rounded


def _decoded(stored: StoredValue, shape: ValueShape, value: torch.Tensor) -> torch.Tensor | None:
    """Decode a value that is not native, layer by layer; None if it cannot be decoded."""
    # Imported here: it compiles loops, which a worker that moves only native values does not need.
    from ragcache_kv.codecs import decode_part  # noqa: PLC0415

    try:
        for layer, out in enumerate(value):
            encoded = np.frombuffer(stored.part(layer), np.uint8)
            numbers = _bytes(out).reshape(-1)
            decode_part(encoded, shape, value.shape[2], stored.info.precision, out=numbers)
    except ValueError as error:
        log.warning(
            "value decoder: decode failed precision=%s error=%s", stored.info.precision, error
        )
        return None
    return value


def _bytes(value: torch.Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = value.view(torch.uint8).numpy()
    return array
