"""A compiled loop that shifts one layer's tokens in a CPU's paged cache.

In torch a layer's shift takes some forty small operations, more time than its arithmetic. The
loop works on the packed elements themselves, so nothing is gathered or scattered.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import types

from ragcache_kv.codecs.kernels import Kernel, compiled, f32, i64, inlined, u16, u32
from ragcache_kv.codecs.numbers import Number
from ragcache_kv.rotation.cpu import number_loader, number_storer


@cache
def shift_kernel(number: Number, half: int, head_dim: int) -> Kernel:
    """Compile the loop for keys of a dtype and a size.

    The kernel's arguments, in this order:
        layer: The elements of the layer's cache, changed in place (``PackedCache``).
        recomputed: Offsets of the recomputed tokens' old keys and values, int64. Cosines and sines
            of their positions, float32 [recomputed, 2, half].
        new: Their new keys and values; bit patterns [recomputed, heads, head_dim].
        weights: float32 [chunks, recomputed] (``ShiftPlan``).
        shifted: The same as ``recomputed`` of the tokens to shift, and the chunk of each, int64.
        layout: The dimensions of each rotated pair, int64 [2, half]. Offsets of a token's
            dimensions, of keys and of values, int64 [head_dim]. Elements from one head to the next.

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

    angles = f32[:, :, ::1]

    @compiled(
        bits[::1],
        types.Tuple((i64[::1], i64[::1], angles)),
        types.UniTuple(bits[:, :, ::1], 2),
        f32[:, ::1],
        types.Tuple((i64[::1], i64[::1], angles, i64[::1])),
        types.Tuple((i64[:, ::1], i64[::1], i64[::1], i64)),
    )
    def shift(
        layer: Any, recomputed: Any, new: Any, weights: Any, shifted: Any, layout: Any
    ) -> None:
        recomputed_keys, recomputed_values, recomputed_angles = recomputed
        new_keys, new_values = new
        shifted_keys, shifted_values, shifted_angles, chunk_of = shifted
        pairs, key_dims, value_dims, head_stride = layout
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
