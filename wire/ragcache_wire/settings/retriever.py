"""Settings of the retriever."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Final, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ragcache_core.errors import InvalidInput
from ragcache_wire.settings.field_types import (
    Address,
    Count,
    HttpUrl,
    LogLevel,
    whole_number,
)
from ragcache_wire.settings.table import Accepts, ServiceSettings, setting, variable

BUNDLED_EMBEDDER: Final = "bundled:all-minilm-l6-v2"
MAX_EMBEDDER_THREADS: Final = 256
MAX_DEFAULT_THREADS: Final = 8
"""Most threads of an embedder in the retriever by default. Beyond, Python's lock limits them."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


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


EmbedderThreads = Annotated[
    int,
    BeforeValidator(whole_number),
    Field(ge=1, le=MAX_EMBEDDER_THREADS),
    Accepts(f"a number from 1 to {MAX_EMBEDDER_THREADS}"),
]


class RetrieverSettings(ServiceSettings):
    """What the retriever reads from its environment."""

    service: ClassVar[str] = "retriever"

    listen: Address = setting(internal="The operator chooses the port.")
    """Address that the gRPC server binds."""
    health_listen: Address | None = setting(None, internal="The operator chooses the port.")
    """Address for health over HTTP: /healthz and /readyz. Without it, health is served by gRPC
    alone."""
    data_dir: Path = setting(internal="The operator mounts the volume.")
    """Folder of the documents and their vectors."""
    model: str = setting(spec="spec.model.source")
    """The serving model: a folder or a Hugging Face name. Only its tokenizer is
    read: it counts and digests the tokens of chunks."""
    embedder: Annotated[
        str,
        AfterValidator(_embedder),
        Accepts(
            f"{BUNDLED_EMBEDDER}, path:FOLDER with an absolute path, hf:ORGANISATION/NAME, or the "
            "base URL of an OpenAI-compatible endpoint"
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
    chunk_tokens: Count = setting(256, spec="spec.retriever.chunking.size")
    """Most tokens of a chunk, in collections that set no chunking."""
    chunk_overlap_tokens: Count = setting(32, spec="spec.retriever.chunking.overlap")
    """Tokens that a chunk shares with the one before it, in collections that set no chunking."""
    window_chunks: Count = setting(1, spec="spec.retriever.chunking.window")
    """Neighbours that a search returns on each side of a hit, in collections that set no window."""
    otlp_endpoint: HttpUrl | None = setting(None, spec="spec.telemetry.otlp.endpoint")
    """Base URL of an OpenTelemetry collector (OTLP over HTTP). Without it, no spans are made."""
    log_level: LogLevel = setting("info", internal="The operator runs every service at info.")
    """Least severe level that is logged."""

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
