"""Decoding in Triton, with its interpreter, equals that of the CPU; and it compiles for GPUs.

Triton reads TRITON_INTERPRET as it is imported, so each runs in a process of its own: this file as
a program. To compile takes no GPU. The interpreter accepts what the compiler does not.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np

from ragcache_core.identity.variant import Codec, Precision, ValueShape
from ragcache_kv.codecs import decode_part, encode_part
from ragcache_kv.codecs.gse import NOT_FINITE
from ragcache_kv.codecs.numbers import NUMBERS, narrow, widen
from tests.kit.triton_program import as_a_program

CASES = (("bfloat16", 80), ("bfloat16", 7), ("float16", 64), ("float32", 80))
NUM_TOKENS = 6


def difference(dtype: str, dim: int, precision: Precision) -> str:
    """Return the difference of the two results; empty if they are equal."""
    import torch

    from ragcache_kv.codecs import device

    shape, number = ValueShape(1, 3, dim, dtype), NUMBERS[dtype]
    rng = np.random.default_rng(dim)
    values = rng.standard_t(1.5, (2, NUM_TOKENS, 3, dim)) * 2.0 ** rng.integers(-30, 3, dim)
    values[0, 0] *= 1e-30
    values[0, 1] = 0
    values[:, 4:6] *= 1e30
    values = np.clip(values, -number.limit, number.limit)
    if dim != 64:  # GSE-8 would have nothing else in its values
        values[1, 3, 1, dim // 2] = np.nan
    part = narrow(values.astype(np.float32).ravel(), number)
    encoded = encode_part(part.view(np.uint8), shape, NUM_TOKENS, precision)
    expected = decode_part(encoded, shape, NUM_TOKENS, precision).view(number.bits)
    result = device.decode_part(torch.from_numpy(encoded), shape, NUM_TOKENS, precision)
    actual = result.view(-1).view(torch.uint8).numpy().view(number.bits)
    nan = np.isnan(widen(expected, number))
    if not np.array_equal(nan, np.isnan(widen(actual, number))):
        return "other NaNs"
    count = int(np.count_nonzero(actual[~nan] != expected[~nan]))
    return f"{count} numbers" if count else ""


def refusals() -> list[str]:
    """Return the names of invalid inputs that were accepted."""
    import torch

    from ragcache_kv.codecs import device

    shape, precision = ValueShape(1, 2, 32, "bfloat16"), Precision(Codec.INT8, Codec.INT4)
    encoded = torch.from_numpy(encode_part(np.zeros(512, np.uint8), shape, 2, precision))
    packed = Precision(Codec.PACKED, Codec.INT8)
    cases: dict[str, tuple[torch.Tensor, Precision, torch.Tensor | None]] = {
        "short": (encoded[:-1], precision, None),
        "packed": (encoded, packed, None),
        "out": (encoded, precision, torch.zeros(2, 2, 2, 32)),
    }
    taken = []
    for name, (part, its_precision, out) in cases.items():
        try:
            device.decode_part(part, shape, 2, its_precision, out)
            taken.append(name)
        except ValueError:
            pass
    return taken


def compiled() -> list[str]:
    """Compile every kernel for each dtype, and return their names."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ragcache_kv.codecs import device

    fp8 = {"CODE_BITS": 8, "GROUP": 32, "PER_PROGRAM": 64}
    kinds: dict[str, dict[str, float]] = {
        "int8": {**fp8, "FRACTION_BITS": 0, "BIAS": 0, "UNIT": 0.0},
        "int4": {**fp8, "CODE_BITS": 4, "FRACTION_BITS": 0, "BIAS": 0, "UNIT": 0.0},
        "e4m3": {**fp8, "FRACTION_BITS": 3, "BIAS": 7, "UNIT": 2.0**-9},
        "e5m2": {**fp8, "FRACTION_BITS": 2, "BIAS": 15, "UNIT": 2.0**-16},
        "gse8": {"PER_PROGRAM": 2048, "FRACTION_BITS": 3, "NOT_FINITE": NOT_FINITE},
    }
    done = []
    # Every dtype for one chip, and the dtype of most models for the others.
    targets = [*itertools.product(("*i16", "*fp16", "*fp32"), (90,)), ("*i16", 80), ("*i16", 100)]
    for (pointer, chip), (name, constants) in itertools.product(targets, kinds.items()):
        numbers = ("num_numbers",) if name == "gse8" else ("num_groups", "groups", "dim")
        chosen = {**constants, "BFLOAT16": pointer == "*i16"}
        signature = {"encoded": "*u8", "out": pointer} | dict.fromkeys(numbers, "i32")
        signature |= dict.fromkeys(chosen, "constexpr")
        kernel = device._decode_gse if name == "gse8" else device._decode_grouped
        constexprs = {(list(signature).index(one),): value for one, value in chosen.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
        assert triton.compile(source, target=GPUTarget("cuda", chip, 32)).asm["cubin"]
        done.append(f"{name} {pointer} {chip}")
    return done


def main() -> None:
    if "TRITON_INTERPRET" not in os.environ:
        print(json.dumps(compiled()))
        return
    fixed = [codec for codec in Codec if codec is not Codec.PACKED]
    precisions = [Precision(codec, codec) for codec in fixed]
    precisions += [Precision(Codec.INT8, Codec.INT4), Precision(Codec.GSE8, Codec.NATIVE)]
    found = {"taken": ",".join(refusals())}
    for (dtype, dim), precision in itertools.product(CASES, precisions):
        found[f"{dtype} {dim} {precision}"] = difference(dtype, dim, precision)
    print(json.dumps({name: what for name, what in found.items() if what} | {"of": len(found)}))


def test_triton_decodes_as_the_cpu_does() -> None:
    assert as_a_program(__file__, TRITON_INTERPRET="1") == {"of": 1 + len(CASES) * 10}


def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    assert len(as_a_program(__file__, TRITON_CACHE_DIR=str(tmp_path))) == 25


if __name__ == "__main__":
    main()
