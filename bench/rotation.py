"""Measures key rotation beside a plain copy, and its error.

It runs on one core, part by part as in an engine, in buffers far larger than any CPU cache. Every
kind of rotation runs next to a copy (``np.copyto``) of the same bytes in every round. Shares are
medians of the copy's time over the rotation's; 1 means equal speed. Into another buffer a rotation
moves the same bytes as the copy; in place it reads and writes the same memory.

The error is the root mean square of the change of bfloat16 keys against the same rotation in
float64, relative to the rotated pair. Rounding alone is the lower bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from ragcache_kv.codecs.numbers import BFLOAT16, NUMBERS, nearest_bfloat16, widen
from ragcache_kv.rotation import KeyRotation, Pairing, Rope, read_rope

KV_HEADS, HEAD_DIM = 8, 128
PART_TOKENS = 256
"""A part's keys are 512 KiB, like one layer of a chunk of an 8B model."""
DELTAS = (1, -1, 700, -3001, 100_000)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
KINDS = [(dtype, pairing) for dtype in NUMBERS for pairing in Pairing]
MAIN = ("bfloat16", Pairing.HALVES)


def rope(pairing: Pairing) -> Rope:
    config = {"model_type": "llama", "head_dim": HEAD_DIM, "rope_parameters": LLAMA3}
    return read_rope(config, pairing)


def keys_of(dtype: str, num_bytes: int) -> np.ndarray:
    """Return keys [parts, tokens, kv_heads, head_dim]; each part starts at another number."""
    number = NUMBERS[dtype]
    part = np.random.default_rng(0).standard_normal((PART_TOKENS, KV_HEADS, HEAD_DIM))
    single = part.astype(np.float32)
    if number is BFLOAT16:
        bits = nearest_bfloat16(single)
    else:
        bits = single.astype(dtype).view(number.bits)
    return np.stack([np.roll(bits, i) for i in range(num_bytes // bits.nbytes)])


def speeds(dtype: str, pairing: Pairing, buffer_mib: int, rounds: int) -> dict[str, float]:
    """Return rotation speeds, out of target and in place, as shares of copying; and GB/s."""
    rotation = KeyRotation(rope(pairing), dtype)
    keys = keys_of(dtype, buffer_mib << 20)
    out = np.zeros_like(keys)

    def into() -> None:
        for part, target in zip(keys, out, strict=True):
            rotation.rotate_keys(part, 700, target)

    def in_place() -> None:
        for part in out:
            rotation.rotate_keys(part, 700)

    taken: dict[str, list[float]] = {"copy": [], "into": [], "in_place": []}
    for _ in range(rounds):
        taken["into"].append(seconds(into))
        taken["copy"].append(seconds(lambda: np.copyto(out, keys)))
        taken["in_place"].append(seconds(in_place))
    shares = {
        name: statistics.median(c / t for c, t in zip(taken["copy"], taken[name], strict=True))
        for name in ("into", "in_place")
    }
    return {**shares, "memcpy_gb_s": keys.nbytes / statistics.median(taken["copy"]) / 1e9}


def seconds(task: Callable[[], object]) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def errors() -> dict[str, dict[str, float]]:
    """Return errors of bfloat16 keys by position delta: of rotating, and of rounding alone."""
    given = rope(Pairing.HALVES)
    rotation = KeyRotation(given, "bfloat16")
    bits = keys_of("bfloat16", 4 << 20)
    before = pairs(widen(bits, BFLOAT16))
    found = {}
    for delta in DELTAS:
        exact = before * np.exp(1j * np.array(given.frequencies) * delta)
        moved = pairs(widen(rotation.rotate_keys(bits.copy(), delta), BFLOAT16))
        parts = (exact.real.astype(np.float32), exact.imag.astype(np.float32))
        real, imaginary = (widen(nearest_bfloat16(part), BFLOAT16) for part in parts)
        found[str(delta)] = {
            "moved": share(moved - exact, exact),
            "rounding": share(real + 1j * imaginary - exact, exact),
        }
    return found


def pairs(keys: np.ndarray) -> np.ndarray:
    left, right = np.split(keys.astype(np.float64), 2, axis=-1)
    return left + 1j * right


def share(error: np.ndarray, of: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.abs(error) ** 2) / np.mean(np.abs(of) ** 2)))


def device_speed(buffer_mib: int, rounds: int) -> dict[str, float] | None:
    """Return the GPU rotation speed as a share of copying there; None without a GPU."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return None
    rotation = KeyRotation(rope(Pairing.HALVES), "bfloat16")
    keys = keys_of("bfloat16", buffer_mib << 20)
    native = torch.from_numpy(keys.view(np.int16)).cuda().view(torch.bfloat16)
    out = torch.empty_like(native)
    tasks: dict[str, Callable[[], Any]] = {
        "into": lambda: rotation.rotate_keys(native, 700, out),
        "in_place": lambda: rotation.rotate_keys(out, 700),
    }
    ratios: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds + 1):
        for name, task in tasks.items():
            started, rotated, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            started.record()
            task()
            rotated.record()
            out.copy_(native)
            ended.record()
            ended.synchronize()
            ratios[name].append(rotated.elapsed_time(ended) / started.elapsed_time(rotated))
    same = rotation.rotate_keys(native[:8].cpu().clone(), 700)
    equal = torch.equal(rotation.rotate_keys(native[:8].clone(), 700).cpu(), same)
    medians = {
        name: statistics.median(some[1:]) for name, some in ratios.items()
    }  # the first call compiles
    return {**medians, "equals_cpu": equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller buffers")
    quick = parser.parse_args().quick
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, for copies too

    compiled = {}
    for dtype, pairing in KINDS:
        start = time.process_time()
        KeyRotation(rope(pairing), dtype).warm_up()
        compiled[f"{dtype} {pairing}"] = round(time.process_time() - start, 3)
    error = errors()
    print("error of bfloat16 keys by delta, and of rounding alone")
    for delta, some in error.items():
        print(f"  {delta:>7s}", *(f"{number:.7f}" for number in some.values()))
    buffer_mib = 256 if quick else 512
    found = {}
    print("over a copy: into another buffer, in place; the copy's GB/s")
    for dtype, pairing in KINDS:
        rounds = (7 if quick else 25) if (dtype, pairing) == MAIN else (3 if quick else 15)
        speed = speeds(dtype, pairing, buffer_mib, rounds)
        found[f"{dtype} {pairing}"] = speed
        print(f"  {dtype:9s} {pairing:11s}", *(f"{number:8.2f}" for number in speed.values()))
    main_speed = found[" ".join(MAIN)]
    result = {
        "rotate_over_memcpy": round(main_speed["into"], 3),
        "rotate_in_place_over_memcpy": round(main_speed["in_place"], 3),
        "memcpy_gb_s": round(main_speed["memcpy_gb_s"], 2),
        "by_kind": {
            kind: {name: round(number, 3) for name, number in speed.items()}
            for kind, speed in found.items()
        },
        "buffer_mib": buffer_mib,
        "error": error,
        "compile_cpu_s": compiled,
        "device_rotate_over_copy": device_speed(buffer_mib, 20),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
