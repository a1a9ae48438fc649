"""``ragcache size``: the sizes that a model, its documents and its questions need."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from ragcache_cli.commands.options import OutputOption, grouped
from ragcache_cli.local.placement import checkout_model
from ragcache_cli.models.catalog import FETCHED_MODELS
from ragcache_cli.output.console import make_console, print_json
from ragcache_core import sizing
from ragcache_core.cost.gpu_fit import GpuFit, gpu_fit
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.fingerprint import kv_space
from ragcache_kv.model.weights import read_weights_bytes
from ragcache_kv.values.layout import ELEMENT_BYTES, value_bytes
from ragcache_operator.spec.quantity import parse_quantity
from ragcache_operator.spec.ragcache import BUNDLED_MODELS, GPUSpec
from ragcache_operator.spec.retriever import BUNDLED_DIMENSION
from ragcache_operator.spec.values import ChunkingSpec

CHUNK_TOKENS: Final = ChunkingSpec().size
_HITS: Final = 4
PROMPT_TOKENS: Final = _HITS * (1 + 2 * ChunkingSpec().window) * CHUNK_TOKENS
"""Tokens of a prompt with the gateway's default of four hits, each with its neighbours."""
_ANSWER_TOKENS: Final = 256
_REQUESTS_AT_ONCE: Final = 8
_MEMORY_SHARE: Final = 0.03
"""Share of the chunks that got 60 % of the reads. Source: RAGCache section 3.2."""
_DISK_SHARE: Final = 0.5
"""Share of the chunks that gets 90 % of the reads if 3 % of them get 60 %, by Zipf's law."""
_BUSY_SHARE: Final = 0.7
"""Share of its time that a process is busy. The rest is for bursts."""
_ANSWERS_PER_S: Final = 769
"""Answers of one gateway per second, measured by ``bench.gateway_overhead``."""
_SEARCH_S: Final = 0.056
"""CPU time of a search among a million chunks, measured by ``bench.ingest``."""
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a platform.

    Attributes:
        store_memory_bytes: ``spec.cacheStore.memory``.
        store_disk_bytes: ``spec.cacheStore.disk.size``.
        store_pod_bytes: Memory of the store's pod.
        retriever_pod_bytes: Memory of a retriever's pod.
        retriever_volume_bytes: ``spec.retriever.storage.size``.
        retriever_cores: Cores that searches keep busy.
        gateway_replicas: ``spec.gateway.replicas``.
        kv_memory_bytes: ``spec.engines[].kvMemory``.
        engine_tokens_per_s: Prompt tokens per second that all engines together must compute.
        gpu: Whether the model and its prompts fit into a GPU's memory; None if none is given.
    """

    token_bytes: int
    chunk_bytes: int
    all_chunks_bytes: int
    store_memory_bytes: int
    store_disk_bytes: int
    store_pod_bytes: int
    retriever_pod_bytes: int
    retriever_volume_bytes: int
    retriever_cores: float
    gateway_replicas: int
    kv_memory_bytes: int
    engine_tokens_per_s: float
    gpu: GpuFit | None = None


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """The GPU that an engine computes on."""

    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", metavar="SIZE", help="Memory of a GPU, like 80Gi."),
    ] = None
    memory_share: Annotated[
        float,
        typer.Option(
            "--memory-share",
            metavar="S",
            min=0.1,
            max=0.98,
            help="As in engines[].gpu.memoryShare.",
        ),
    ] = GPUSpec().memory_share
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="SIZE",
            help="Size of the weights in memory, like 16Gi.",
            show_default="as the model's files say",
        ),
    ] = None


@grouped
def size_command(
    model: Annotated[
        str,
        typer.Option(
            metavar="FOLDER|NAME", help="A folder with a config.json, or a bundled model."
        ),
    ],
    chunks: Annotated[
        int, typer.Option(metavar="N", min=1, max=10**9, help="Chunks of all documents.")
    ],
    rate: Annotated[
        float,
        typer.Option(metavar="R", min=0, max=10**6, help="Questions per second, of all users."),
    ],
    gpu: GpuOptions,
    output: OutputOption = "text",
) -> None:
    """Compute the sizes that a model, its documents and its questions need."""
    found = sizes(model, chunks, rate)
    if gpu.gpu_memory is not None:
        found = replace(found, gpu=_gpu_fit(model, found.token_bytes, gpu))
    if output == "json":
        print_json(asdict(found))
    else:
        make_console().print(_table(found))


def sizes(model: str, num_chunks: int, questions_per_s: float) -> Sizes:
    """Return the sizes of a platform with the default settings.

    Args:
        model: Name of a bundled model, or a folder with a ``config.json``.

    Raises:
        InvalidInput: There is no such model, or its KV has no known size.
    """
    token_bytes = _token_bytes(_config(model))
    chunk_bytes = CHUNK_TOKENS * token_bytes
    memory_bytes = _round_up(
        max(
            sizing.tier_bytes(math.ceil(num_chunks * _MEMORY_SHARE), chunk_bytes),
            sizing.least_memory_tier_bytes(chunk_bytes),
        ),
        _MIB,
    )
    on_disk_bytes = sizing.tier_bytes(math.ceil(num_chunks * _DISK_SHARE), chunk_bytes)
    disk_bytes = _round_up(sizing.volume_bytes(on_disk_bytes), _GIB)
    index_bytes = sizing.index_bytes(num_chunks, BUNDLED_DIMENSION, "float32", has_graph=False)
    documents_bytes = sizing.documents_bytes(num_chunks, CHUNK_TOKENS, BUNDLED_DIMENSION)
    kv_tokens = _REQUESTS_AT_ONCE * (PROMPT_TOKENS + _ANSWER_TOKENS)
    return Sizes(
        token_bytes=token_bytes,
        chunk_bytes=chunk_bytes,
        all_chunks_bytes=num_chunks * chunk_bytes,
        store_memory_bytes=memory_bytes,
        store_disk_bytes=disk_bytes,
        store_pod_bytes=sizing.shard_memory_bytes(memory_bytes, disk_bytes),
        retriever_pod_bytes=sizing.retriever_memory_bytes(index_bytes),
        retriever_volume_bytes=_round_up(documents_bytes, _GIB),
        retriever_cores=questions_per_s * _SEARCH_S,
        gateway_replicas=max(1, math.ceil(questions_per_s / (_ANSWERS_PER_S * _BUSY_SHARE))),
        kv_memory_bytes=_round_up(kv_tokens * token_bytes, _GIB),
        engine_tokens_per_s=questions_per_s * PROMPT_TOKENS / _BUSY_SHARE,
    )


def _gpu_fit(model: str, token_bytes: int, gpu: GpuOptions) -> GpuFit:
    engine_bytes = int(_option_bytes("--gpu-memory", str(gpu.gpu_memory)) * gpu.memory_share)
    if gpu.weights is not None:
        weights_bytes = _option_bytes("--weights", gpu.weights)
    else:
        weights_bytes = _weights_bytes(model)
    request_bytes = (PROMPT_TOKENS + _ANSWER_TOKENS) * token_bytes
    return gpu_fit(engine_bytes, weights_bytes, request_bytes, _REQUESTS_AT_ONCE)


def _option_bytes(option: str, given: str) -> int:
    try:
        return parse_quantity(given)
    except ValueError as error:
        problem = f"{given!r} is no size"
        raise InvalidInput(option, problem, "write it like 80Gi or 24Gi") from error


def _weights_bytes(model: str) -> int:
    name = model.removeprefix("bundled:")
    if name in FETCHED_MODELS:
        return FETCHED_MODELS[name].num_bytes
    folder = checkout_model(name) if name in BUNDLED_MODELS else Path(model)
    found = None if folder is None else read_weights_bytes(str(folder), "auto")
    if found is None:
        raise InvalidInput("--model", f"{model} has no weights of a known size", "give --weights")
    return found


def _table(found: Sizes) -> Table:
    """Render a row for each size, with the rule that it follows from."""
    table = Table(box=None, pad_edge=False)
    table.add_column("WHAT")
    table.add_column("SIZE", justify="right")
    table.add_column("FROM")
    for row in _rows(found):
        table.add_row(*row)
    return table


def _rows(found: Sizes) -> Iterator[tuple[str, str, str]]:
    yield (
        "KV of a token",
        _amount(found.token_bytes),
        "2 x layers x KV heads x head size x bytes of a number",
    )
    yield "KV of a chunk", _amount(found.chunk_bytes), f"{CHUNK_TOKENS} tokens"
    yield "KV of all chunks", _amount(found.all_chunks_bytes), "once each"
    yield (
        "cacheStore.memory",
        _amount(found.store_memory_bytes),
        "3 % of the chunks, which got 60 % of the reads (RAGCache, section 3.2)",
    )
    yield (
        "cacheStore.disk.size",
        _amount(found.store_disk_bytes),
        "half of the chunks, which get 90 % of such reads",
    )
    yield (
        "memory of the store's pod",
        _amount(found.store_pod_bytes),
        "memory + 960 MiB + disk.size / 256",
    )
    yield (
        "memory of a retriever's pod",
        _amount(found.retriever_pod_bytes),
        f"768 MiB + twice a vector of {BUNDLED_DIMENSION} numbers for each chunk",
    )
    yield "retriever.storage.size", _amount(found.retriever_volume_bytes), "6 KiB for each chunk"
    yield (
        "cores for searches",
        f"{found.retriever_cores:.2f}",
        f"{_SEARCH_S * 1e3:.0f} ms for each, measured among 1,000,000 chunks",
    )
    yield (
        "gateway.replicas",
        str(found.gateway_replicas),
        f"{_ANSWERS_PER_S} answers per second on a core, measured; busy {_BUSY_SHARE:.0%}",
    )
    yield (
        "engines[].kvMemory",
        _amount(found.kv_memory_bytes),
        f"{_REQUESTS_AT_ONCE} prompts of {PROMPT_TOKENS:,} tokens, with answers, at once",
    )
    if found.gpu is not None:
        yield from _gpu_rows(found.gpu)
    yield (
        "speed of all engines",
        f"{math.ceil(found.engine_tokens_per_s):,} tokens/s",
        f"rate x {PROMPT_TOKENS:,} tokens without reuse; engines busy {_BUSY_SHARE:.0%}",
    )
    yield (
        "engines[].replicas",
        "",
        "that speed / computed_tokens x pass_s of 'prefill profile' in an engine's log",
    )


def _gpu_rows(gpu: GpuFit) -> Iterator[tuple[str, str, str]]:
    yield "an engine's share of the GPU", _amount(gpu.engine_bytes), "memory x gpu.memoryShare"
    yield "weights", _amount(gpu.weights_bytes), "files of the model, or --weights"
    verdict = "fits" if gpu.fits else f"TOO SMALL for {_REQUESTS_AT_ONCE} requests at once"
    yield (
        "left for KV and activations",
        _amount(gpu.kv_bytes),
        f"{verdict}: KV of {gpu.requests_at_once} requests; vLLM measures its activations itself",
    )


def _config(model: str) -> Mapping[str, Any]:
    """Return the ``config.json`` of a model, or what the catalog knows of it."""
    name = model.removeprefix("bundled:")
    if name in FETCHED_MODELS:
        return FETCHED_MODELS[name].kv_config
    folder = checkout_model(name) if name in BUNDLED_MODELS else Path(model)
    if folder is None or not folder.is_dir():
        names = ", ".join(BUNDLED_MODELS)
        raise InvalidInput("--model", f"{model!r} is no folder and none of {names}", "name one")
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        problem = f"{folder / 'config.json'} cannot be read ({error})"
        raise InvalidInput("--model", problem, "name a Hugging Face model folder") from error
    if not isinstance(config, dict):
        raise InvalidInput("--model", f"{folder} has no JSON object", "correct the model folder")
    return config


def _token_bytes(config: Mapping[str, Any]) -> int:
    space = kv_space("", config, "auto")
    if space.dtype not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise InvalidInput("--model", f"its numbers are {space.dtype}", f"use one with {known}")
    token_bytes = value_bytes(space, 1)
    if token_bytes <= 0:
        raise InvalidInput("config.json", "gives KV without bytes", "name a decoder model")
    return token_bytes


def _round_up(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes


def _amount(num_bytes: float) -> str:
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:,.0f} {_UNITS[unit]}" if unit == 0 else f"{num_bytes:,.2f} {_UNITS[unit]}"
