"""Rotation on a GPU: one Triton kernel for a part, or for a whole value.

The results equal those of ``cpu`` bit for bit, except for the bits of a NaN. This module needs
Triton.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from ragcache_kv.rotation.rope import Pairing, Rope, cos_sin

_PROGRAM_PAIRS = 1024
_CACHED = 256


def rotate(
    given: torch.Tensor,
    out: torch.Tensor,
    rope: Rope,
    delta: int,
    layout: tuple[int, int, int, int],
) -> None:
    """Rotate the keys of given into out, on the current stream.

    Args:
        given: Contiguous.
        out: given itself, or a contiguous tensor of its dtype and shape that does not overlap it.
        rope: The model's rotation.
        delta: Difference of positions in tokens.
        layout: Groups, halves of each group (keys first), rows of each half, head_dim.

    Raises:
        ValueError: given and out overlap in part.
    """
    before, after = given.view(layout), out.view(layout)
    in_place = _is_same_memory(given, out)
    if not in_place:
        rotated_dim = rope.rotary_dim if delta else 0
        after[:, 1:].copy_(before[:, 1:])
        after[:, 0, :, rotated_dim:].copy_(before[:, 0, :, rotated_dim:])
    groups, _, rows, dim = layout
    if delta == 0 or given.numel() == 0:
        return
    half = rope.rotary_dim // 2
    padded = triton.next_power_of_2(half)
    program_rows = max(1, _PROGRAM_PAIRS // padded)
    _rotate[(triton.cdiv(rows, program_rows), groups)](
        _stored(before),
        _stored(after),
        _table(rope, delta, pinned=given.device.type != "cpu").to(given.device, non_blocking=True),
        rows,
        before.stride(0),
        2 * half if rope.by_layer else 0,
        DIM=dim,
        HALF=half,
        PADDED=padded,
        ROWS=program_rows,
        NEIGHBOURS=rope.pairing is Pairing.NEIGHBOURS,
        BFLOAT16=given.dtype == torch.bfloat16,
        enable_fp_fusion=False,  # a fused product is not rounded, as it is on the CPU
    )


@lru_cache(_CACHED)
def _table(rope: Rope, delta: int, *, pinned: bool) -> torch.Tensor:
    """Return cosines and sines. The thread need not wait until a GPU has read pinned memory."""
    ropes = [rope.of_layer(index) for index in range(len(rope.by_layer) or 1)]
    table = torch.from_numpy(np.stack([cos_sin(one, delta) for one in ropes]))
    return table.pin_memory() if pinned else table


def _is_same_memory(given: torch.Tensor, out: torch.Tensor) -> bool:
    num_bytes = given.numel() * given.element_size()
    distance = abs(given.data_ptr() - out.data_ptr())
    if 0 < distance < num_bytes:
        raise ValueError("out overlaps the rotated keys in part")
    return distance == 0


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return what the kernel accesses: the bits of bfloat16, which it rounds, else the numbers."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@triton.jit  # type: ignore[untyped-decorator]
def _load(pointer: tl.tensor, mask: tl.tensor, BFLOAT16: tl.constexpr) -> tl.tensor:  # noqa: N803
    values = tl.load(pointer, mask=mask, other=0)
    if BFLOAT16:
        widened = (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        widened = values.to(tl.float32)
    return widened


@triton.jit  # type: ignore[untyped-decorator]
def _store(pointer: tl.tensor, values: tl.tensor, mask: tl.tensor, BFLOAT16: tl.constexpr) -> None:  # noqa: N803
    """Round ties to even, as in ``cpu``."""
    if BFLOAT16:
        bits = values.to(tl.uint32, bitcast=True)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        bits = tl.where(nan, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        tl.store(pointer, (bits >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(pointer, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(
    keys: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    num_rows: tl.tensor,
    group_numbers: tl.tensor,
    table_numbers: tl.tensor,
    DIM: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    NEIGHBOURS: tl.constexpr,  # noqa: N803
    BFLOAT16: tl.constexpr,  # noqa: N803
) -> None:
    """Rotate ROWS rows of one group in each program. Groups begin group_numbers apart, and their
    tables table_numbers: 0 if they share one.

    HALF is the number of rotated pairs of a row, PADDED its next power of two. A program reads
    everything before it writes.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, PADDED)
    is_rotated = pair < HALF
    table += tl.program_id(1) * table_numbers
    cosines = tl.load(table + pair, mask=is_rotated, other=0.0)[None, :]
    sines = tl.load(table + HALF + pair, mask=is_rotated, other=0.0)[None, :]
    mask = (row < num_rows)[:, None] & is_rotated[None, :]
    if NEIGHBOURS:
        within = 2 * pair
        apart = 1
    else:
        within = pair
        apart = HALF
    left = tl.program_id(1).to(tl.int64) * group_numbers + row[:, None] * DIM + within[None, :]
    x = _load(keys + left, mask, BFLOAT16)
    y = _load(keys + left + apart, mask, BFLOAT16)
    _store(out + left, x * cosines - y * sines, mask, BFLOAT16)
    _store(out + left + apart, y * cosines + x * sines, mask, BFLOAT16)
