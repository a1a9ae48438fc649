"""Settings of the retriever."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ragcache_core.errors import InvalidInput
from ragcache_wire.settings.field_types import (
    Address,
    ByteQuantity,
    Count,
    HttpUrl,
    Limit,
    LogForm,
    LogLevel,
    OnOff,
    whole_number,
)
from ragcache_wire.settings.part import PartSettings
from ragcache_wire.settings.table import Accepts, setting, variable

BUNDLED_EMBEDDER: Final = "bundled:all-minilm-l6-v2"
MAX_EMBEDDER_THREADS: Final = 256
MAX_DEFAULT_THREADS: Final = 8
"""Most threads of an embedder in the retriever by default. Beyond, Python's lock limits them."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[0-9a-f]{40})?", re.ASCII)


def _embedder(value: str) -> str:
    if value == BUNDLED_EMBEDDER:
        return value
    kind, _, name = value.partition(":")
    if kind == "path" and Path(name).is_absolute():
        return value
    if kind == "hf" and _HUB_NAME.fullmatch(name):
        return value
    if not value.startswith(("http://", "https://")):
        raise ValueError("no embedder")
    return value.rstrip("/")


def _reranker(value: str) -> str:
    if value in ("none", "cross-encoder"):
        return value
    if not value.startswith(("http://", "https://")):
        raise ValueError("no reranker")
    return value.rstrip("/")


ExpectedRecall = Annotated[
    float, Field(ge=0.5, le=1, allow_inf_nan=False), Accepts("a number from 0.5 to 1")
]
EmbedderThreads = Annotated[
    int,
    BeforeValidator(whole_number),
    Field(ge=1, le=MAX_EMBEDDER_THREADS),
    Accepts(f"a number from 1 to {MAX_EMBEDDER_THREADS}"),
]


class RetrieverSettings(PartSettings):
    """What the retriever reads from its environment."""

    service: ClassVar[str] = "retriever"

    listen: Address = setting(internal="The operator chooses the port.")
    """Address that the gRPC server binds."""
    health_listen: Address | None = setting(None, internal="The operator chooses the port.")
    """Address for /healthz, /readyz and /metrics over HTTP. Without it, health is served by gRPC
    alone, and metrics are not served."""
    data_dir: Path = setting(internal="The operator mounts the volume.")
    """Folder of the documents and their vectors."""
    model: str = setting(spec="spec.model.source")
    """The serving model: a folder or a Hugging Face name. Only its tokenizer is
    read: it counts and digests the tokens of chunks."""
    embedder: Annotated[
        str,
        AfterValidator(_embedder),
        Accepts(
            f"{BUNDLED_EMBEDDER}, path:FOLDER with an absolute path, hf:ORGANISATION/NAME with or "
            "without @COMMIT, or the base URL of an OpenAI-compatible endpoint"
        ),
    ] = setting(BUNDLED_EMBEDDER, spec="spec.retriever.embedder.source")
    """What turns text into vectors: the bundled model, another model in the form of
    sentence-transformers, or an endpoint."""
    embedder_model: str | None = setting(None, spec="spec.retriever.embedder.model")
    """Model to ask an endpoint for. An endpoint needs it."""
    embedder_api_key: str = setting("", spec="spec.retriever.embedder.keySecret", repr=False)
    """API key of an endpoint. Without it, requests carry none."""
    embedder_threads: EmbedderThreads | None = setting(
        None, internal="The default uses the cores that the retriever may use."
    )
    """Batches that an embedder in the retriever computes at once, each on one core. By default one
    per usable core, at most 8."""
    device: Literal["cpu", "cuda"] = setting(
        "cpu", internal="The operator derives it from spec.retriever.gpu."
    )
    """Where an embedder and a cross-encoder in the retriever compute. cuda needs an NVIDIA GPU and
    torch's build for it. Vectors are searched on the processor."""
    chunk_tokens: Count = setting(256, spec="spec.retriever.chunking.size")
    """Most tokens of a chunk, in collections that set no chunking."""
    chunk_overlap_tokens: Count = setting(32, spec="spec.retriever.chunking.overlap")
    """Tokens that a chunk shares with the one before it, in collections that set no chunking."""
    window_chunks: Count = setting(1, spec="spec.retriever.chunking.window")
    """Neighbours that a search returns on each side of a hit, in collections that set no window."""
    index_kind: Literal["auto", "flat", "ivf", "hnsw"] = setting(
        "auto", spec="spec.retriever.index.kind"
    )
    """Kind of the vector index of collections that set none."""
    index_recall: ExpectedRecall | None = setting(None, spec="spec.retriever.index.recall")
    """Recall at which a search stops early. Without it, a search ends after all its stages."""
    index_precision: Literal["float32", "sq8"] = setting(
        "float32", spec="spec.retriever.index.precision"
    )
    """Precision of vectors in the index."""
    reranker: Annotated[
        str,
        AfterValidator(_reranker),
        Accepts("none, cross-encoder, or the base URL of an endpoint with /rerank"),
    ] = setting("none", spec="spec.retriever.reranker.source")
    """What orders the best hits of a search again."""
    reranker_model: str | None = setting(None, spec="spec.retriever.reranker.model")
    """Name or folder of a cross-encoder, or the model to ask the reranker's endpoint for. Both need
    it."""
    reranker_api_key: str = setting("", spec="spec.retriever.reranker.keySecret", repr=False)
    """API key of the reranker's endpoint. Without it, requests carry none."""
    max_searches: Limit = setting(256, spec="spec.retriever.limits.searches")
    """Most searches at once. Further ones are rejected."""
    max_upsert_bytes: ByteQuantity = setting(64 << 20, spec="spec.retriever.limits.upsertBytes")
    """Most bytes of documents that are prepared at once. Further ones are rejected."""
    backend: Literal["embedded", "postgres", "milvus"] = setting(
        "embedded", internal="The operator derives it from spec.retriever.backend."
    )
    """Where documents and vectors are stored."""
    backend_url: str | None = setting(
        None, internal="A Secret that spec.retriever.backend names has it.", repr=False
    )
    """URL of PostgreSQL or Milvus. These backends need it."""
    otlp_endpoint: HttpUrl | None = setting(None, spec="spec.telemetry.otlp.endpoint")
    """Base URL of an OpenTelemetry collector (OTLP over HTTP) for spans and metrics. Without it,
    none are sent."""
    trace_content: OnOff = setting(False, spec="spec.telemetry.content")
    """Whether spans have the text of questions, answers and retrieved chunks."""
    log_level: LogLevel = setting("info", spec="spec.telemetry.logLevel")
    """Least severe level that is logged."""
    log_format: LogForm = setting("text", spec="spec.telemetry.logs")
    """Format of log lines: text, or one JSON object in each line."""

    @property
    def embeds_itself(self) -> bool:
        """Whether the retriever embeds texts itself, so that it asks no endpoint."""
        return self.embedder.startswith(("bundled:", "path:", "hf:"))

    @model_validator(mode="after")
    def _endpoint_has_a_model(self) -> Self:
        if not self.embeds_itself and self.embedder_model is None:
            raise InvalidInput(
                variable("embedder_model"), "is not set", "name the endpoint's embedding model"
            )
        return self

    @model_validator(mode="after")
    def _reranker_has_a_model(self) -> Self:
        if self.reranker != "none" and self.reranker_model is None:
            raise InvalidInput(
                variable("reranker_model"), "is not set", f"name a model of {self.reranker}"
            )
        return self

    @model_validator(mode="after")
    def _backend_has_a_url(self) -> Self:
        if self.backend != "embedded" and self.backend_url is None:
            raise InvalidInput(
                variable("backend_url"), "is not set", f"set the URL of {self.backend}"
            )
        return self
