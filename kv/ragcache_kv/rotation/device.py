"""Rotation on a GPU: one Triton kernel for a part, or for a whole value at once.

Bit for bit what ``processor`` makes of the same keys, but for the bits of a NaN. Import this only
where there is Triton.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ragcache_kv.rotation.angles import turn
from ragcache_kv.rotation.rope import Pairing, Rope

_PROGRAM_PAIRS = 1024
_HELD = 256


def rotate(
    given: torch.Tensor,
    out: torch.Tensor,
    rope: Rope,
    delta: int,
    layout: tuple[int, int, int, int],
) -> None:
    """Rotate the keys of what is given into out, which is the same or does not overlap it.

    Both contiguous, of one dtype and a layout: groups, halves of each (keys first), rows of each,
    head_dim. The work is queued on the current stream. Raises ValueError if they overlap in part.
    """
    before, after = given.view(layout), out.view(layout)
    in_place = _same_place(given, out)
    if not in_place:
        turned = rope.rotary_dim if delta else 0
        after[:, 1:].copy_(before[:, 1:])
        after[:, 0, :, turned:].copy_(before[:, 0, :, turned:])
    groups, _, rows, dim = layout
    if delta == 0 or given.numel() == 0:
        return
    half = rope.rotary_dim // 2
    padded = triton.next_power_of_2(half)
    together = max(1, _PROGRAM_PAIRS // padded)
    _rotate[(triton.cdiv(rows, together), groups)](
        _stored(before),
        _stored(after),
        _turn_on(rope, delta, given.device),
        rows,
        before.stride(0),
        DIM=dim,
        HALF=half,
        PADDED=padded,
        TOGETHER=together,
        NEIGHBOURS=rope.pairing is Pairing.NEIGHBOURS,
        BFLOAT16=given.dtype == torch.bfloat16,
        enable_fp_fusion=False,  # a fused product is not rounded, as it is on the CPU
    )


@lru_cache(_HELD)
def _turn_on(rope: Rope, delta: int, device: torch.device) -> torch.Tensor:
    # It is there when this returns, so that any stream may read it.
    return torch.from_numpy(turn(rope, delta)).to(device)


def _same_place(given: torch.Tensor, out: torch.Tensor) -> bool:
    num_bytes = given.numel() * given.element_size()
    apart = abs(given.data_ptr() - out.data_ptr())
    if 0 < apart < num_bytes:
        raise ValueError("out overlaps what is rotated")
    return apart == 0


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """What the kernel reads and writes: the bits of bfloat16, which it rounds; else the numbers."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@triton.jit  # type: ignore[untyped-decorator]
def _load(place: tl.tensor, mask: tl.tensor, BFLOAT16: tl.constexpr) -> tl.tensor:  # noqa: N803
    values = tl.load(place, mask=mask, other=0)
    if BFLOAT16:
        widened = (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        widened = values.to(tl.float32)
    return widened


@triton.jit  # type: ignore[untyped-decorator]
def _store(place: tl.tensor, values: tl.tensor, mask: tl.tensor, BFLOAT16: tl.constexpr) -> None:  # noqa: N803
    """Ties to even, as in ``processor``."""
    if BFLOAT16:
        bits = values.to(tl.uint32, bitcast=True)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        bits = tl.where(nan, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        tl.store(place, (bits >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(place, values.to(place.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(
    keys: tl.tensor,
    out: tl.tensor,
    turn_at: tl.tensor,
    num_rows: tl.tensor,
    group_numbers: tl.tensor,
    DIM: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
    TOGETHER: tl.constexpr,  # noqa: N803
    NEIGHBOURS: tl.constexpr,  # noqa: N803
    BFLOAT16: tl.constexpr,  # noqa: N803
) -> None:
    """TOGETHER rows of one group to a program; groups begin group_numbers apart.

    HALF: pairs of a row that turn, PADDED to a power of two. A program reads all it writes first.
    """
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    pair = tl.arange(0, PADDED)
    turns = pair < HALF
    cosines = tl.load(turn_at + pair, mask=turns, other=0.0)[None, :]
    sines = tl.load(turn_at + HALF + pair, mask=turns, other=0.0)[None, :]
    mask = (row < num_rows)[:, None] & turns[None, :]
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
