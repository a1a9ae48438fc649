"""The NVIDIA GPUs of this machine, and which component gets which."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from ragcache_core.errors import InvalidInput
from ragcache_operator.spec.ragcache import EngineSpec, RagCacheSpec

DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_TIMEOUT_S: Final = 30.0
"""Time of ``nvidia-smi``. Without a running persistence daemon it first loads the driver."""
_QUERY: Final = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine.

    Args:
        device: Its UUID. CUDA numbers GPUs in another order than the driver does.
        index: Of the driver.
    """

    device: str
    index: str
    name: str
    memory_bytes: int


def find_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that the driver reports, and that CUDA_VISIBLE_DEVICES allows.

    Raises:
        InvalidInput: The driver is not installed, or reports none.
    """
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        raise _no_gpu("nvidia-smi is not installed")
    try:
        done = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_gpu(f"nvidia-smi does not run: {error}") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}")[:200]
        raise _no_gpu(f"nvidia-smi fails: {said}")
    allowed = environment.get(DEVICES_VARIABLE)
    found = [gpu for gpu in parse_gpus(done.stdout) if _is_allowed(gpu, allowed)]
    if not found:
        more = "" if allowed is None else f" that {DEVICES_VARIABLE}={allowed} allows"
        raise _no_gpu(f"nvidia-smi lists no GPU{more}")
    return found


def parse_gpus(text: str) -> list[Gpu]:
    """Return the GPUs of a table with index, UUID, name and MiB of memory.

    Other lines are ignored.
    """
    found = []
    for line in text.splitlines():
        fields = [one.strip() for one in line.split(",")]
        if len(fields) >= 4 and fields[0].isdecimal() and fields[-1].isdecimal():
            index, device, *name, memory_mib = fields
            found.append(Gpu(device, index, ", ".join(name), int(memory_mib) * _MIB))
    return found


def gpus_for(spec: RagCacheSpec) -> Sequence[Gpu]:
    """Return the GPUs of this machine if a spec asks for some; none if it does not.

    Raises:
        InvalidInput: This machine, or this Python, lacks what the spec asks for.
    """
    if not _wanted(spec):
        return ()
    found = find_gpus()
    check_gpus(spec, len(found), _torch_version())
    return found


def check_gpus(spec: RagCacheSpec, num_gpus: int, torch_version: str) -> None:
    """Check that each rank of an engine gets a GPU, and that one build of vLLM serves all.

    A retriever on a GPU gets one of its own, too.

    Args:
        torch_version: Of the installed torch, like ``2.13.0+cpu``. Empty if there is none.

    Raises:
        InvalidInput: There are too few, or torch computes on processors only.
    """
    wanted = _wanted(spec)
    if num_gpus < len(wanted):
        raise InvalidInput(
            wanted[num_gpus],
            f"needs a GPU, and {len(wanted)} are needed in all: this machine has {num_gpus}",
            "use the processor, lower tensorParallel, or leave it out",
        )
    on_cpu = [i for i, engine in enumerate(spec.engines) if _is_on_cpu(engine)]
    if on_cpu and any(engine.device == "cuda" for engine in spec.engines):
        raise InvalidInput(
            f"spec.engines[{on_cpu[0]}].device",
            "is cpu, and another group computes on a GPU: vLLM has a build for each",
            "use one device for all groups on this machine",
        )
    if torch_version.endswith("+cpu"):
        raise InvalidInput(
            wanted[0],
            f"asks for a GPU, and torch {torch_version} computes on processors only",
            "install torch's CUDA build, which 'ragcache[engine-gpu]' does",
        )


def _wanted(spec: RagCacheSpec) -> list[str]:
    """Return the field that asks for each GPU."""
    engines = [
        f"spec.engines[{i}].{'tensorParallel' if rank else 'device'}"
        for i, one in enumerate(spec.engines)
        if one.device == "cuda"
        for rank in range(one.tensor_parallel)
    ]
    return engines if spec.retriever.gpu is None else [*engines, "spec.retriever.gpu"]


def _is_on_cpu(engine: EngineSpec) -> bool:
    return engine.url is None and engine.device == "cpu"


def _is_allowed(gpu: Gpu, allowed: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES has its index, or its UUID or the beginning of it."""
    if allowed is None:
        return True
    listed = [one.strip() for one in allowed.split(",")]
    return gpu.index in listed or any(
        gpu.device.startswith(one) for one in listed if one and not one.isdecimal()
    )


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _no_gpu(problem: str) -> InvalidInput:
    return InvalidInput(
        "spec",
        f"asks for a GPU, and this machine has no NVIDIA GPU: {problem}",
        "install the NVIDIA driver, or set engines[].device to cpu and leave out retriever.gpu",
    )
