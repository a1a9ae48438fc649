"""A compiled loop that shifts one layer's tokens in a CPU's paged cache.

In torch a layer's shift takes some forty small operations, more time than its arithmetic. The
loop works on the packed elements themselves, so nothing is gathered or scattered.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ragcache_kv.codecs.kernels import Kernel, compiled, f32, i64, inlined, u16, u32
from ragcache_kv.codecs.numbers import Number
from ragcache_kv.rotation.cpu import number_loader, number_storer


@cache
def shift_kernel(number: Number, half: int, head_dim: int) -> Kernel:
    """Compile the loop for keys of a dtype and a size.

    The kernel's arguments, in this order:
        layer: The elements of the layer's cache, changed in place (``PackedCache``).
        recomputed_keys, recomputed_values: Offsets of the recomputed tokens' old KV; int64.
        new_keys, new_values: Their new KV; bit patterns [recomputed, heads, head_dim].
        weights: float32 [chunks, recomputed] (``ShiftPlan``).
        recomputed_angles: Cosines and sines of their positions; float32 [recomputed, 2, half].
        shifted_keys, shifted_values: Offsets of the tokens to shift; int64.
        chunk_of: The chunk of each; int64.
        shifted_angles: As ``recomputed_angles``, [shifted, 2, half].
        pairs: The dimensions of each rotated pair; int64 [2, half].
        key_dims, value_dims: Offsets of a token's dimensions; int64 [head_dim].
        head_stride: Elements from one head to the next.

    Args:
        number: The dtype of the cache.
        half: Pairs of dimensions that the model rotates.
        head_dim: Dimensions of a key.
    """
    load, store = number_loader(number), number_storer(number)
    bits = u32 if number.num_bytes == 4 else u16

    @inlined
    def rotate(vector: Any, angles: Any, sign: Any, pairs: Any) -> None:
        for pair in range(half):
            one, other = pairs[0, pair], pairs[1, pair]
            x, y = vector[one], vector[other]
            cosine, sine = angles[0, pair], angles[1, pair] * sign
            vector[one] = x * cosine - y * sine
            vector[other] = y * cosine + x * sine

    @compiled(
        bits[::1],
        i64[::1],
        i64[::1],
        bits[:, :, ::1],
        bits[:, :, ::1],
        f32[:, ::1],
        f32[:, :, ::1],
        i64[::1],
        i64[::1],
        i64[::1],
        f32[:, :, ::1],
        i64[:, ::1],
        i64[::1],
        i64[::1],
        i64,
    )
    def shift(
        layer: Any,
        recomputed_keys: Any,
        recomputed_values: Any,
        new_keys: Any,
        new_values: Any,
        weights: Any,
        recomputed_angles: Any,
        shifted_keys: Any,
        shifted_values: Any,
        chunk_of: Any,
        shifted_angles: Any,
        pairs: Any,
        key_dims: Any,
        value_dims: Any,
        head_stride: Any,
    ) -> None:
        num_chunks, num_heads = weights.shape[0], new_keys.shape[1]
        key_shifts = np.zeros((num_chunks, num_heads, head_dim), np.float32)
        value_shifts = np.zeros((num_chunks, num_heads, head_dim), np.float32)
        vector = np.zeros(head_dim, np.float32)
        for row in range(len(recomputed_keys)):
            for chunk in range(num_chunks):
                weight = weights[chunk, row]
                if weight == f32(0):
                    continue
                for head in range(num_heads):
                    start = recomputed_keys[row] + head * head_stride
                    for dim in range(head_dim):
                        old = load(layer[start + key_dims[dim]])
                        vector[dim] = load(new_keys[row, head, dim]) - old
                    rotate(vector, recomputed_angles[row], f32(-1), pairs)
                    start = recomputed_values[row] + head * head_stride
                    for dim in range(head_dim):
                        key_shifts[chunk, head, dim] += weight * vector[dim]
                        old = load(layer[start + value_dims[dim]])
                        change = load(new_values[row, head, dim]) - old
                        value_shifts[chunk, head, dim] += weight * change
        for row in range(len(shifted_keys)):
            chunk = chunk_of[row]
            for head in range(num_heads):
                for dim in range(head_dim):
                    vector[dim] = key_shifts[chunk, head, dim]
                rotate(vector, shifted_angles[row], f32(1), pairs)
                start = shifted_keys[row] + head * head_stride
                for dim in range(head_dim):
                    at = start + key_dims[dim]
                    layer[at] = store(load(layer[at]) + vector[dim])
                start = shifted_values[row] + head * head_stride
                for dim in range(head_dim):
                    at = start + value_dims[dim]
                    layer[at] = store(load(layer[at]) + value_shifts[chunk, head, dim])

    return shift
