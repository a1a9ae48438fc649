"""Rotation in Triton, with its interpreter, equals that of the CPU.

Triton reads TRITON_INTERPRET as it is imported, so the comparison runs in a process of its own:
this file as a program. There is no GPU in it, so tensors of the CPU are given to the kernel itself.
The interpreter takes what the compiler refuses, so the kernel is compiled as well, for GPUs that
need not be there.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcache_kv.codecs.numbers import NUMBERS, nearest_bfloat16, widen
from ragcache_kv.rotation import KeyRotation, Pairing, read_rope
from tests.kit.triton_program import as_a_program

KEYS = ((64, 1.0), (80, 0.5), (96, 1.0))
LAYERS, TOKENS, HEADS = 2, 21, 3
CASES = list(itertools.product(NUMBERS, Pairing, KEYS, (True, False), (-3001, 0, 100_000)))


def difference(
    dtype: str, pairing: Pairing, keys: tuple[int, float], in_place: bool, delta: int
) -> str:
    """Return the difference of the two rotations; empty if they are equal."""
    import torch

    from ragcache_kv.rotation import device

    dim, partial = keys
    config = {"model_type": "llama", "head_dim": dim, "partial_rotary_factor": partial}
    rope, number = read_rope(config, pairing), NUMBERS[dtype]
    if dim == KEYS[-1][0]:  # layers that differ
        still = (0.0,) * len(rope.frequencies)
        rope = replace(rope, by_layer=(rope.frequencies, still))
    rng = np.random.default_rng(dim)
    values = rng.standard_t(2, (LAYERS, 2, TOKENS, HEADS, dim)).astype(np.float32)
    values[0, 0, 0, 0, :2] = 0, -0.0
    values[0, 0, 1] *= 1e-30
    if number.limit > 1e6:
        values[0, 0, 2] *= 1e30
    if delta:
        values[1, 0, 3, 1, 5], values[1, 0, 4, 1, 6] = np.nan, np.inf
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    single: dict[str, NDArray[Any]] = {"float16": half, "float32": values}
    bits = nearest_bfloat16(values) if dtype == "bfloat16" else single[dtype].view(number.bits)
    expected = KeyRotation(rope, dtype).rotate_part(bits.copy(), delta)
    signed = torch.from_numpy(bits.view(f"<i{number.num_bytes}").copy())
    given = signed.view(getattr(torch, dtype))
    out = given if in_place else torch.zeros_like(given)
    device.rotate(given, out, rope, delta, (LAYERS, 2, TOKENS * HEADS, dim))
    actual = out.view(signed.dtype).numpy().view(number.bits)
    nan = np.isnan(widen(expected, number))
    if not np.array_equal(nan, np.isnan(widen(actual, number))):
        return "other NaNs"
    count = int(np.count_nonzero(actual[~nan] != expected[~nan]))
    return f"{count} numbers" if count else ""


def overlapping() -> str:
    """Return "" if overlapping memory is refused."""
    import torch

    from ragcache_kv.rotation import device

    room = torch.zeros(2 * 3 * 64 + 64)
    rope = read_rope({"model_type": "llama", "head_dim": 64})
    try:
        device.rotate(room[:-64], room[64:], rope, 1, (1, 2, 3, 64))
    except ValueError:
        return ""
    return "taken"


def fused() -> dict[str, int]:
    """Count products that are fused with a sum in each kernel; there must be none.

    They are rounded once where the CPU rounds twice.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ragcache_kv.rotation import device

    constants = {"DIM": 128, "HALF": 64, "PADDED": 64, "ROWS": 16}
    found = {}
    for pointer, neighbours, chip in itertools.product(
        ("*i16", "*fp16", "*fp32"), (False, True), (80, 90, 100)
    ):
        chosen = {**constants, "NEIGHBOURS": neighbours, "BFLOAT16": pointer == "*i16"}
        signature = {"keys": pointer, "out": pointer, "table": "*fp32"}
        sizes = {"num_rows": "i32", "group_numbers": "i64", "table_numbers": "i32"}
        signature |= sizes | dict.fromkeys(chosen, "constexpr")
        constexprs = {(list(signature).index(name),): value for name, value in chosen.items()}
        source = ASTSource(fn=device._rotate, signature=signature, constexprs=constexprs)
        target = GPUTarget("cuda", chip, 32)
        compiled = triton.compile(source, target=target, options={"enable_fp_fusion": False})
        found[f"{pointer} {neighbours} {chip}"] = compiled.asm["ptx"].count("fma.")
        assert compiled.asm["cubin"]
    return found


def main() -> None:
    if "TRITON_INTERPRET" not in os.environ:
        print(json.dumps(fused()))
        return
    found = {" ".join(map(str, case)): difference(*case) for case in CASES}
    found["overlap"] = overlapping()
    print(json.dumps({name: what for name, what in found.items() if what} | {"of": len(found)}))


def test_triton_rotates_as_the_cpu_does() -> None:
    assert as_a_program(__file__, TRITON_INTERPRET="1") == {"of": len(CASES) + 1}


def test_the_kernel_compiles_for_gpus_and_fuses_nothing(tmp_path: Path) -> None:
    found = as_a_program(__file__, TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 18
    assert not any(found.values())


if __name__ == "__main__":
    main()
