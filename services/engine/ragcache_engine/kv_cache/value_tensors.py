"""Chunks' KV between tensors and the bytes that a store holds."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch

from ragcache_core.identity.keys import KVSpace
from ragcache_core.identity.variant import Precision, ValueShape
from ragcache_kv.values.layout import FORMAT, value_bytes
from ragcache_kv.values.stored_value import StoredValue

log = logging.getLogger("vllm.ragcache")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def value_shape(space: KVSpace) -> ValueShape:
    """Shape of one token's KV."""
    return ValueShape(space.num_layers, space.num_kv_heads, space.head_dim, space.dtype)


def native_bytes(value: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, where they lie."""
    return _bytes(value).data.cast("B")


def value_dims(space: KVSpace, num_tokens: int) -> tuple[int, int, int, int, int]:
    """[num_layers, 2, num_tokens, num_kv_heads, head_dim]."""
    return (space.num_layers, 2, num_tokens, space.num_kv_heads, space.head_dim)


def matches_space(stored: StoredValue, num_tokens: int, space: KVSpace) -> bool:
    """Whether a value says that it is of so many tokens of a space, in the format known here."""
    if stored.value_format != FORMAT or stored.shape != value_shape(space):
        return False
    return stored.info.num_tokens == num_tokens and len(stored.parts) == space.num_layers


def decode(stored: StoredValue, num_tokens: int, space: KVSpace) -> torch.Tensor | None:
    """Value as [num_layers, 2, num_tokens, num_kv_heads, head_dim]; None if it is no such value.

    Its checksums have been verified where its bytes came in. A native value is used where it lies.
    """
    if not matches_space(stored, num_tokens, space):
        return None
    dims = value_dims(space, num_tokens)
    if stored.info.precision != Precision():
        return _decoded(stored, value_shape(space), dims)
    if len(stored.value) != value_bytes(space, num_tokens):
        return None
    return torch.frombuffer(stored.value, dtype=DTYPES[space.dtype]).view(dims)


def _decoded(stored: StoredValue, shape: ValueShape, dims: tuple[int, ...]) -> torch.Tensor | None:
    """A value that is held in another form, layer by layer."""
    # Imported here: it compiles loops, which who only moves native values does without.
    from ragcache_kv.codecs import decode_part  # noqa: PLC0415

    value = torch.empty(dims, dtype=DTYPES[shape.dtype])
    try:
        for layer, out in enumerate(value):
            encoded = np.frombuffer(stored.part(layer), np.uint8)
            decode_part(encoded, shape, dims[2], stored.info.precision, out=_bytes(out).reshape(-1))
    except ValueError as error:
        log.warning("a value held as %s cannot be read: %s", stored.info.precision, error)
        return None
    return value


def _bytes(value: torch.Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = value.view(torch.uint8).numpy()
    return array
