"""Decodes on the GPU with Triton kernels, so that only encoded bytes cross the bus.

The results equal those of ``part`` on the CPU bit for bit, except for the bits of a NaN. ``packed``
is not decoded here, since its exceptions make the work depend on the data. This module needs
Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragcache_core.identity.variant import Codec, Precision, ValueShape
from ragcache_kv.codecs.grouped import E4M3, E5M2, INT4, INT8, Fp8, Grouped
from ragcache_kv.codecs.gse import GSE8, GSE8_125, GSE8_134, NOT_FINITE, Gse
from ragcache_kv.codecs.numbers import NUMBERS
from ragcache_kv.codecs.part import encoded_part_bytes

_GROUPED: dict[Codec, Grouped] = {
    Codec.INT8: INT8,
    Codec.INT4: INT4,
    Codec.E4M3: E4M3,
    Codec.E5M2: E5M2,
}
_GSE = {Codec.GSE8: GSE8, Codec.GSE8_125: GSE8_125, Codec.GSE8_134: GSE8_134}
_PROGRAM_NUMBERS = 2048


def decode_part(
    encoded: torch.Tensor,
    shape: ValueShape,
    num_tokens: int,
    precision: Precision,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode one layer on the current stream.

    Args:
        encoded: uint8, on the device.
        shape: Shape of the value.
        num_tokens: Number of tokens.
        precision: Precision of encoded.
        out: Contiguous, of the result's shape and the KV's dtype; None for new memory.

    Returns:
        The native layer, [2, num_tokens, num_kv_heads, head_dim].

    Raises:
        ValueError: A tensor has another size, or the precision is ``packed``.
    """
    if Codec.PACKED in (precision.key, precision.value):
        raise ValueError("packed parts are decoded on the CPU")
    layout = (2, num_tokens, shape.num_kv_heads, shape.head_dim)
    dtype = getattr(torch, NUMBERS[shape.dtype].name)
    if out is None:
        out = torch.empty(layout, dtype=dtype, device=encoded.device)
    if tuple(out.shape) != layout or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"out is not a contiguous {shape.dtype} tensor of shape {layout}")
    if encoded.dtype != torch.uint8 or not encoded.is_contiguous():
        raise ValueError("encoded is not a contiguous uint8 tensor")
    encoded_bytes = encoded_part_bytes(shape, num_tokens, precision)
    if encoded.numel() != encoded_bytes:
        raise ValueError(f"{encoded.numel()} bytes instead of {encoded_bytes}")
    key_bytes = encoded_part_bytes(shape, num_tokens, Precision(precision.key, precision.key)) // 2
    _decode_half(encoded[:key_bytes], out[0], precision.key)
    _decode_half(encoded[key_bytes:], out[1], precision.value)
    return out


def _decode_half(encoded: torch.Tensor, out: torch.Tensor, codec: Codec) -> None:
    if out.numel() == 0:
        return
    dim = out.shape[-1]
    rows = out.numel() // dim
    if codec in _GROUPED:
        coder = _GROUPED[codec]
        groups = -(-dim // coder.group)
        fraction_bits, bias = (
            (coder.fraction_bits, coder.bias) if isinstance(coder, Fp8) else (0, 0)
        )
        program_groups = _PROGRAM_NUMBERS // coder.group
        _decode_grouped[(triton.cdiv(rows * groups, program_groups),)](
            encoded,
            _stored(out),
            rows * groups,
            groups,
            dim,
            GROUP=coder.group,
            PER_PROGRAM=program_groups,
            CODE_BITS=coder.code_bits,
            FRACTION_BITS=fraction_bits,
            BIAS=bias,
            UNIT=2.0 ** (1 - bias - fraction_bits),
            BFLOAT16=out.dtype == torch.bfloat16,
        )
    elif codec in _GSE:
        gse: Gse = _GSE[codec]
        _decode_gse[(triton.cdiv(out.numel(), _PROGRAM_NUMBERS),)](
            encoded,
            _stored(out),
            out.numel(),
            PER_PROGRAM=_PROGRAM_NUMBERS,
            FRACTION_BITS=gse.fraction_bits,
            NOT_FINITE=NOT_FINITE,
            BFLOAT16=out.dtype == torch.bfloat16,
        )
    else:
        out.view(-1).view(torch.uint8).copy_(encoded)


def _stored(out: torch.Tensor) -> torch.Tensor:
    """Return what a kernel writes: the bits of bfloat16, which it rounds, else the numbers."""
    return out.view(torch.int16) if out.dtype == torch.bfloat16 else out


@triton.jit  # type: ignore[untyped-decorator]
def _store(pointer: tl.tensor, values: tl.tensor, mask: tl.tensor, BFLOAT16: tl.constexpr) -> None:  # noqa: N803
    """Round bfloat16 as ``numbers.narrow``, ties away from zero; cast other dtypes."""
    if BFLOAT16:
        bits = values.to(tl.uint32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits + 0x8000)
        tl.store(pointer, (bits >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(pointer, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_grouped(
    encoded: tl.tensor,
    out: tl.tensor,
    num_groups: tl.tensor,
    groups: tl.tensor,
    dim: tl.tensor,
    GROUP: tl.constexpr,  # noqa: N803
    PER_PROGRAM: tl.constexpr,  # noqa: N803
    CODE_BITS: tl.constexpr,  # noqa: N803
    FRACTION_BITS: tl.constexpr,  # noqa: N803
    BIAS: tl.constexpr,  # noqa: N803
    UNIT: tl.constexpr,  # noqa: N803
    BFLOAT16: tl.constexpr,  # noqa: N803
) -> None:
    """Decode PER_PROGRAM groups in each program. A vector has ``groups`` groups.

    FRACTION_BITS, BIAS and UNIT (the smallest number) are those of FP8; FRACTION_BITS is 0 for INT.
    """
    group = tl.program_id(0).to(tl.int64) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    is_valid = group < num_groups
    low = tl.load(encoded + 2 * group, mask=is_valid, other=0).to(tl.uint32)
    high = tl.load(encoded + 2 * group + 1, mask=is_valid, other=0).to(tl.uint32)
    scale = ((low | (high << 8)) << 16).to(tl.float32, bitcast=True)

    within = (group % groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = (group // groups)[:, None]
    mask = is_valid[:, None] & (within < dim)
    codes = encoded + 2 * num_groups
    if CODE_BITS == 4:
        byte = tl.load(codes + row * ((dim + 1) // 2) + within // 2, mask=mask, other=0)
        half = (byte.to(tl.int32) >> (4 * (within % 2)).to(tl.int32)) & 15
        values = ((half ^ 8) - 8).to(tl.float32)
    elif FRACTION_BITS == 0:
        byte = tl.load(codes + row * dim + within, mask=mask, other=0)
        values = byte.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        code = tl.load(codes + row * dim + within, mask=mask, other=0).to(tl.uint32)
        magnitude = code & 0x7F
        normal = (magnitude << (23 - FRACTION_BITS)) + ((127 - BIAS) << 23)
        small = magnitude.to(tl.float32) * UNIT
        bits = tl.where(magnitude < (1 << FRACTION_BITS), small.to(tl.uint32, bitcast=True), normal)
        values = (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    _store(out + row * dim + within, values * scale[:, None], mask, BFLOAT16)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_gse(
    encoded: tl.tensor,
    out: tl.tensor,
    num_numbers: tl.tensor,
    PER_PROGRAM: tl.constexpr,  # noqa: N803
    FRACTION_BITS: tl.constexpr,  # noqa: N803
    NOT_FINITE: tl.constexpr,  # noqa: N803
    BFLOAT16: tl.constexpr,  # noqa: N803
) -> None:
    """Decode PER_PROGRAM numbers in each program."""
    at = tl.program_id(0).to(tl.int64) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    mask = at < num_numbers
    low = tl.load(encoded).to(tl.int32)
    high = tl.load(encoded + 1).to(tl.int8, bitcast=True).to(tl.int32)
    lowest = low | (high << 8)
    code = tl.load(encoded + 2 + at, mask=mask, other=0).to(tl.int32)
    index = (code & 0x7F) >> FRACTION_BITS
    fraction = (code & ((1 << FRACTION_BITS) - 1)).to(tl.float32)
    unit = (lowest + (index - 1) * (FRACTION_BITS - 1) + 127) << 23
    bits = (fraction * unit.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    bits = tl.where(lowest == NOT_FINITE, 0x7FC00000, bits | ((code & 0x80) << 24))
    _store(out + at, bits.to(tl.float32, bitcast=True), mask, BFLOAT16)
