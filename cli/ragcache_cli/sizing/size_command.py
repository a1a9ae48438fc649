"""``ragcache size``: the sizes of a platform for a model, its documents and its traffic."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

import yaml
from rich.text import Text

from ragcache_cli.output.byte_option import parse_bytes
from ragcache_cli.output.console import make_console
from ragcache_cli.output.form import print_json
from ragcache_cli.sizing.fragment import FragmentChoice, fragment
from ragcache_cli.sizing.model_size import read_model
from ragcache_cli.sizing.size_options import (
    AnswerTokensOption,
    ChunksOption,
    ChunkTokensOption,
    ConcurrentOption,
    DecodeOption,
    DimensionOption,
    DtypeOption,
    HitShareOption,
    HostTierOption,
    IndexKindOption,
    IndexPrecisionOption,
    MemoryHitShareOption,
    ModelOption,
    NameOption,
    PrecisionOption,
    PrefillRateOption,
    ProfileOption,
    PromptChunksOption,
    PromptTokensOption,
    RecomputeShareOption,
    RequestsOption,
    ReuseOption,
    ReuseShareOption,
    ShardsOption,
    SizeOutputOption,
    SourceOption,
    StoreDiskOption,
    StoreMemoryOption,
    UtilizationOption,
    VariantsOption,
    WeightsOption,
    ZipfOption,
)
from ragcache_cli.sizing.size_table import notes, size_table
from ragcache_core.cost.engine_costs import EngineCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import Precision
from ragcache_core.sizing.choices import (
    Demand,
    EngineChoice,
    IndexChoice,
    ReuseChoice,
    StoreChoice,
)
from ragcache_core.sizing.platform_size import platform_size
from ragcache_core.sizing.popularity import DEFAULT_EXPONENT
from ragcache_operator.spec import BUNDLED_DIMENSION, ChunkingSpec, ModelSpec, ReuseSpec

_CHUNKING: Final = ChunkingSpec()
_REUSE: Final = ReuseSpec()
_PROMPT_CHUNKS: Final = 4 * (1 + 2 * _CHUNKING.window)
"""Chunks of a prompt with the gateway's default of four hits, each with its neighbours."""


def size_command(
    model: ModelOption,
    chunks: ChunksOption,
    requests_per_second: RequestsOption,
    chunk_tokens: ChunkTokensOption = _CHUNKING.size,
    prompt_chunks: PromptChunksOption = _PROMPT_CHUNKS,
    prompt_tokens: PromptTokensOption = None,
    answer_tokens: AnswerTokensOption = 256,
    zipf: ZipfOption = DEFAULT_EXPONENT,
    reuse: ReuseOption = "exact",
    reuse_share: ReuseShareOption = None,
    recompute_share: RecomputeShareOption = _REUSE.max_recompute_share,
    variants: VariantsOption = 1,
    precision: PrecisionOption = "native",
    shards: ShardsOption = 1,
    hit_share: HitShareOption = 0.9,
    memory_hit_share: MemoryHitShareOption = None,
    store_memory: StoreMemoryOption = None,
    store_disk: StoreDiskOption = None,
    dtype: DtypeOption = "auto",
    weights: WeightsOption = None,
    prefill_tokens_per_second: PrefillRateOption = None,
    profile: ProfileOption = None,
    decode_seconds: DecodeOption = 0.0,
    utilization: UtilizationOption = 0.7,
    concurrent_requests: ConcurrentOption = 8,
    host_tier: HostTierOption = None,
    dimension: DimensionOption = BUNDLED_DIMENSION,
    index_kind: IndexKindOption = "auto",
    index_precision: IndexPrecisionOption = "float32",
    name: NameOption = "docs",
    source: SourceOption = None,
    output: SizeOutputOption = "text",
) -> None:
    """Compute what a platform needs for a model, its documents and its traffic."""
    given = read_model(model, dtype, _optional_bytes("--weights", weights))
    demand = Demand(
        num_chunks=chunks,
        chunk_tokens=chunk_tokens,
        variants_per_chunk=variants,
        zipf_exponent=zipf,
        requests_per_s=requests_per_second,
        prompt_tokens=max(1, prompt_chunks * chunk_tokens)
        if prompt_tokens is None
        else prompt_tokens,
        prompt_chunks=prompt_chunks,
        answer_tokens=answer_tokens,
    )
    store = StoreChoice(
        precision=Precision.parse(precision),
        shards=shards,
        hit_share=hit_share,
        memory_hit_share=min(0.5, hit_share) if memory_hit_share is None else memory_hit_share,
        memory_bytes=_optional_bytes("--store-memory", store_memory),
        volume_bytes=_optional_bytes("--store-disk", store_disk),
    )
    reuse_choice = ReuseChoice(reuse, recompute_share, reuse_share)
    engines = EngineChoice(
        costs=_costs(prefill_tokens_per_second, profile),
        decode_s=decode_seconds,
        utilization=utilization,
        concurrent_requests=concurrent_requests,
        host_tier_bytes=_optional_bytes("--host-tier", host_tier) or 0,
        max_length=max(demand.request_tokens, ModelSpec().max_length),
    )
    index = IndexChoice(dimension, index_precision, has_graph=index_kind == "hnsw")
    found = platform_size(given.size, demand, store, reuse_choice, engines, index)
    if output == "json":
        print_json(asdict(found))
        return
    remarks = list(
        notes(
            found,
            is_known=reuse_share is not None or reuse == "blend",
            counts_decoding=decode_seconds > 0,
        )
    )
    if output == "yaml":
        choice = FragmentChoice(
            name=name,
            source=_source(source or given.source),
            dtype=dtype,
            index={
                "kind": index_kind,
                "precision": index_precision,
                "expectedChunks": chunks,
            },
            dimension=dimension,
        )
        manifest = fragment(found, choice, given.size, store, reuse_choice, engines)
        for remark in remarks:
            print(f"# {remark}")
        print(yaml.safe_dump(manifest, sort_keys=False), end="")
        return
    console = make_console()
    console.print(size_table(found))
    for remark in remarks:
        console.print(Text(remark, style="yellow"))


def _optional_bytes(option: str, text: str | None) -> int | None:
    return None if text is None else parse_bytes(option, text)


def _costs(tokens_per_s: float | None, profile: Path | None) -> EngineCosts | None:
    if profile is not None:
        if tokens_per_s is not None:
            raise InvalidInput("--profile", "is given beside a rate", "leave one of them out")
        return EngineCosts(_read_profile(profile))
    if tokens_per_s is None:
        return None
    # One measured pass: any other takes time in proportion to its tokens.
    return EngineCosts(PrefillProfile((0,), (1,), ((1.0 / tokens_per_s,),), 10**9))


def _read_profile(path: Path) -> PrefillProfile:
    try:
        return PrefillProfile.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        problem = f"{path} cannot be read ({error})"
        raise InvalidInput("--profile", problem, "name a file that an engine wrote") from error


def _source(source: str | None) -> str:
    if source is None:
        raise InvalidInput(
            "--source",
            "is needed for yaml with a folder of this machine",
            "name where pods read the model, like pvc:models/llama-8b or hf:ORGANISATION/NAME",
        )
    return source
