"""Decoding in Triton, through its interpreter, against the CPU's codecs.

Triton reads TRITON_INTERPRET as it is imported, so the comparison runs in a process of its own:
this file as a program.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from ragcache_core.variant import Codec, Precision, ValueShape
from ragcache_kv.codecs import decode_part, encode_part
from ragcache_kv.codecs.numbers import NUMBERS, narrow, widen

CASES = (("bfloat16", 80), ("bfloat16", 7), ("float16", 64), ("float32", 80))
NUM_TOKENS = 6
TIMEOUT_S = 120.0


def difference(dtype: str, dim: int, precision: Precision) -> str:
    """Empty if both decode alike; else what differs."""
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
    """Inputs that are refused, which should be; the others are named."""
    import torch

    from ragcache_kv.codecs import device

    shape, precision = ValueShape(1, 2, 32, "bfloat16"), Precision(Codec.INT8, Codec.INT4)
    encoded = torch.from_numpy(encode_part(np.zeros(512, np.uint8), shape, 2, precision))
    taken = []
    for name, arguments in {
        "short": (encoded[:-1], shape, 2, precision),
        "packed": (encoded, shape, 2, Precision(Codec.PACKED, Codec.INT8)),
        "out": (encoded, shape, 2, precision, torch.zeros(2, 2, 2, 32)),
    }.items():
        try:
            device.decode_part(*arguments)
            taken.append(name)
        except ValueError:
            pass
    return taken


def main() -> None:
    fixed = [codec for codec in Codec if codec is not Codec.PACKED]
    precisions = [Precision(codec, codec) for codec in fixed]
    precisions += [Precision(Codec.INT8, Codec.INT4), Precision(Codec.GSE8, Codec.NATIVE)]
    found = {"taken": ",".join(refusals())}
    for (dtype, dim), precision in itertools.product(CASES, precisions):
        found[f"{dtype} {dim} {precision}"] = difference(dtype, dim, precision)
    print(json.dumps({name: what for name, what in found.items() if what} | {"of": len(found)}))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_triton_decodes_as_the_cpu_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"of": 1 + len(CASES) * 10}


if __name__ == "__main__":
    main()
