"""The options of ``ragcache size``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from ragcache_cli.sizing.model_size import KvType

_TRAFFIC: Final = "Documents and traffic"
_REUSE: Final = "Reuse"
_STORE: Final = "Cache store"
_ENGINES: Final = "Engines"
_RETRIEVER: Final = "Retriever"
_MANIFEST: Final = "For --output yaml"
_MAX_TOKENS: Final = 10_000_000


def _option(panel: str, text: str, *, default: str | bool = True, **more: Any) -> Any:
    """Make an option. default: What help shows in place of the default."""
    return typer.Option(help=text, rich_help_panel=panel, show_default=default, **more)


def _share(panel: str, text: str, **more: Any) -> Any:
    return _option(panel, text, min=0, max=1, **more)


def _size(panel: str, text: str, default: str) -> Any:
    return _option(panel, text, metavar="SIZE", default=default)


ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="FOLDER|NAME",
        help="Folder with a config.json, or a bundled model, like smollm2.",
    ),
]
SizeOutputOption = Annotated[
    Literal["text", "json", "yaml"],
    typer.Option("--output", "-o", help="yaml: a RagCache with the sizes."),
]

ChunksOption = Annotated[
    int, _option(_TRAFFIC, "Chunks of all documents.", metavar="N", min=1, max=10**9)
]
RequestsOption = Annotated[
    float,
    _option(_TRAFFIC, "Questions per second, of all users.", metavar="R", min=0, max=1_000_000),
]
ChunkTokensOption = Annotated[int, _option(_TRAFFIC, "Tokens of a chunk.", min=1, max=4096)]
PromptChunksOption = Annotated[
    int, _option(_TRAFFIC, "Chunks of a prompt; a hit brings its neighbours.", min=0, max=10_000)
]
PromptTokensOption = Annotated[
    int | None,
    _option(_TRAFFIC, "Tokens of a prompt.", min=1, max=_MAX_TOKENS, default="those of its chunks"),
]
AnswerTokensOption = Annotated[int, _option(_TRAFFIC, "Longest answer.", min=1, max=_MAX_TOKENS)]
ZipfOption = Annotated[
    float,
    _option(
        _TRAFFIC, "Exponent of Zipf's law for reads of chunks; 0: all equally often.", min=0, max=5
    ),
]

ReuseOption = Annotated[Literal["exact", "blend"], _option(_REUSE, "As spec.reuse.mode.")]
ReuseShareOption = Annotated[
    float | None,
    _share(
        _REUSE,
        "Measured share of prompt tokens whose KV is loaded.",
        default="from the hit share for blend, 0 for exact",
    ),
]
RecomputeShareOption = Annotated[
    float, _share(_REUSE, "Share of loaded tokens that blend recomputes.")
]
VariantsOption = Annotated[
    int,
    _option(
        _REUSE,
        "Variants to keep of a chunk; for exact, one for each repeated prefix.",
        min=1,
        max=1000,
    ),
]

PrecisionOption = Annotated[
    Literal["native", "packed"], _option(_STORE, "Codec of keys and values.")
]
ShardsOption = Annotated[int, _option(_STORE, "Number of shards.", min=1, max=64)]
HitShareOption = Annotated[float, _share(_STORE, "Wanted share of chunk reads with a hit.")]
MemoryHitShareOption = Annotated[
    float | None,
    _share(_STORE, "Wanted share with a hit in memory.", default="0.5, or --hit-share if less"),
]
StoreMemoryOption = Annotated[
    str | None, _size(_STORE, "Memory tier of each shard, like 4Gi.", "from --memory-hit-share")
]
StoreDiskOption = Annotated[
    str | None, _size(_STORE, "Volume of each shard, like 200Gi.", "from --hit-share")
]

DtypeOption = Annotated[KvType, _option(_ENGINES, "As spec.model.dtype.")]
WeightsOption = Annotated[
    str | None, _size(_ENGINES, "Size of the weights in memory, like 16Gi.", "that of the files")
]
PrefillRateOption = Annotated[
    float | None,
    _option(
        _ENGINES,
        "Measured prompt tokens that an engine computes per second.",
        metavar="RATE",
        min=0.001,
        max=1e9,
        default="engines are not counted",
    ),
]
ProfileOption = Annotated[
    Path | None,
    _option(
        _ENGINES,
        "Profile that an engine has measured, in place of one rate.",
        metavar="FILE",
        default="engines are not counted",
    ),
]
DecodeOption = Annotated[
    float,
    _option(
        _ENGINES,
        "Time of an engine for the tokens of an answer.",
        metavar="SECONDS",
        min=0,
        max=100_000,
    ),
]
UtilizationOption = Annotated[
    float, _option(_ENGINES, "Share of its time that an engine is busy.", min=0.01, max=1)
]
ConcurrentOption = Annotated[
    int, _option(_ENGINES, "Requests that an engine runs at once.", min=1, max=10_000)
]
HostTierOption = Annotated[str | None, _size(_ENGINES, "Host tier of an engine, like 4Gi.", "none")]

DimensionOption = Annotated[int, _option(_RETRIEVER, "Numbers of a vector.", min=1, max=100_000)]
IndexKindOption = Annotated[
    Literal["auto", "flat", "ivf", "hnsw"], _option(_RETRIEVER, "As spec.retriever.index.kind.")
]
IndexPrecisionOption = Annotated[
    Literal["float32", "sq8"], _option(_RETRIEVER, "As spec.retriever.index.precision.")
]

NameOption = Annotated[str, _option(_MANIFEST, "Name of the RagCache.")]
SourceOption = Annotated[
    str | None,
    _option(_MANIFEST, "spec.model.source, like pvc:models/llama-8b.", default="the bundled model"),
]
