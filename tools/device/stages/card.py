"""The card, vLLM's compiled parts, and FlashAttention 3 against float64.

::

    python -m tools.device.stages.card
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import os
import platform
import subprocess
import sys
import time
from typing import Any

from tools.device.packages import LIBRARIES
from tools.device.report import require, run_stage

BLOCK_TOKENS, NUM_BLOCKS = 16, 96
HEADS, KV_HEADS, HEAD_DIM = 24, 8, 128
QUERIES = (1, 37, 300)
CONTEXT = (517, 37, 1011)
MAX_ERROR = 4e-3
"""Relative error of bfloat16 attention; a wrong block or mask gives far more."""


COPIED_BYTES = 256 << 20


def card() -> dict[str, Any]:
    """Name the card and the software, and load vLLM's compiled parts."""
    import torch  # noqa: PLC0415
    import vllm  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    query = "--query-gpu=name,driver_version,memory.total"
    shown = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    folder = vllm.__path__[0].removesuffix("vllm")
    for name in LIBRARIES:
        torch.ops.load_library(folder + name)
    ctypes.CDLL("libcuda.so.1")
    packages = ("torch", "triton", "transformers", "vllm", "numpy", "grpcio")
    return {
        "card": shown.stdout.strip(),
        "capability": torch.cuda.get_device_capability(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "cuda": torch.version.cuda,
        "platform": type(current_platform).__name__,
    }


def flash_attention() -> dict[str, Any]:
    """Compare FlashAttention 3 over a paged cache with float64, for three requests at once."""
    import torch  # noqa: PLC0415
    from vllm.vllm_flash_attn import flash_attn_varlen_func  # noqa: PLC0415

    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    query = drawn(sum(QUERIES), HEADS, HEAD_DIM)
    cache = drawn(NUM_BLOCKS * len(QUERIES), BLOCK_TOKENS, KV_HEADS, 2 * HEAD_DIM)
    order = torch.randperm(len(cache), generator=generator, device="cuda").int()
    table = order.view(len(QUERIES), NUM_BLOCKS)
    starts = torch.tensor([0, *torch.tensor(QUERIES).cumsum(0).tolist()], device="cuda").int()
    found = flash_attn_varlen_func(
        q=query,
        k=cache[..., :HEAD_DIM],
        v=cache[..., HEAD_DIM:],
        max_seqlen_q=max(QUERIES),
        cu_seqlens_q=starts,
        max_seqlen_k=max(CONTEXT),
        seqused_k=torch.tensor(CONTEXT, device="cuda").int(),
        softmax_scale=HEAD_DIM**-0.5,
        causal=True,
        block_table=table,
        fa_version=3,
    )
    errors = []
    for number, (count, length) in enumerate(zip(QUERIES, CONTEXT, strict=True)):
        first = int(starts[number])
        tokens = cache[table[number].long()].reshape(-1, KV_HEADS, 2 * HEAD_DIM)[:length].double()
        keys, values = tokens[..., :HEAD_DIM], tokens[..., HEAD_DIM:]
        keys = keys.repeat_interleave(HEADS // KV_HEADS, 1)
        values = values.repeat_interleave(HEADS // KV_HEADS, 1)
        asked = query[first : first + count].double()
        scores = torch.einsum("qhd,khd->hqk", asked, keys) * HEAD_DIM**-0.5
        rows = torch.arange(length - count, length, device="cuda")[:, None]
        scores.masked_fill_(torch.arange(length, device="cuda")[None] > rows, -torch.inf)
        wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        got = found[first : first + count].double()
        errors.append(float((got - wanted).norm() / wanted.norm()))
    require(max(errors) < MAX_ERROR, f"relative errors {errors}")
    return {"relative_error": [round(error, 6) for error in errors]}


def host_memory() -> dict[str, Any]:
    """Measure copies to the GPU from pinned, pageable and shared memory, in GB/s."""
    import torch  # noqa: PLC0415

    target = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    handle = os.memfd_create("ragcache-device")
    os.ftruncate(handle, COPIED_BYTES)
    mapped = mmap.mmap(handle, COPIED_BYTES)
    os.close(handle)
    shared = torch.frombuffer(mapped, dtype=torch.uint8)
    shared.fill_(1)
    sources = {
        "pinned": torch.ones(COPIED_BYTES, dtype=torch.uint8).pin_memory(),
        "pageable": torch.ones(COPIED_BYTES, dtype=torch.uint8),
        "shared": shared,
    }
    found = {name: _gb_s(source, target) for name, source in sources.items()}
    cudart = torch.cuda.cudart()
    started = time.perf_counter()
    error = int(cudart.cudaHostRegister(shared.data_ptr(), COPIED_BYTES, 0))
    registered_s = time.perf_counter() - started
    require(error == 0, f"cudaHostRegister: error {error}")
    found["shared_registered"] = _gb_s(shared, target)
    require(int(cudart.cudaHostUnregister(shared.data_ptr())) == 0, "cudaHostUnregister failed")
    return {"copy_gb_s": found, "register_gb_s": round(COPIED_BYTES / registered_s / 1e9, 1)}


def _gb_s(source: Any, target: Any) -> float:
    """Return the fastest of five copies."""
    import torch  # noqa: PLC0415

    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return round(COPIED_BYTES / min(seconds) / 1e9, 1)


def main() -> int:
    """Run the stages."""
    run_stage("card", card)
    run_stage("flash attention", flash_attention)
    run_stage("host memory", host_memory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
