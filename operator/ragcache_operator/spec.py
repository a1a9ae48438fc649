"""The RagCache object (DESIGN §7) as typed, frozen values. A field exists when it works.

``manifest`` makes these from YAML; the builders make Kubernetes objects from them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from ragcache_operator.quantity import parse_quantity

GROUP = "ragcache.dev"
API_VERSION = f"{GROUP}/v1alpha1"
KIND = "RagCache"

COMPONENTS = ("gateway", "retriever", "engine", "cachestore")
BUNDLED_MODELS = {"tinyrag": 4096}
"""Models that come with RagCache, and the most tokens each was trained for."""
BUNDLED_EMBEDDER = "bundled:all-minilm-l6-v2"

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HTTP_URL = re.compile(r"https?://[^\s/?#]+[^\s?#]*")
_GIB = 1 << 30


def refusal(problem: str, fix: str, *, at: str | None = None) -> PydanticCustomError:
    """A validator's objection in the two halves that every error here has.

    at: the field that is to blame, when the validator sees several.
    """
    at_path = (at,) if at else ()
    return PydanticCustomError(
        "refused", "refused", {"problem": problem, "fix": fix, "at": at_path}
    )


def _dns_label(text: str) -> str:
    if not _DNS_LABEL.fullmatch(text):
        raise refusal(
            f"{text!r} is no DNS label",
            "use lower-case letters, digits and '-', with a letter or digit at both ends",
        )
    return text


def _byte_quantity(given: object) -> str:
    text = str(given)
    try:
        num_bytes = parse_quantity(text)
    except ValueError as error:
        raise refusal(str(error), "write bytes as Kubernetes does, like 512Mi or 2Gi") from error
    if num_bytes <= 0:
        raise refusal(f"{text} is not above zero", "write a size like 512Mi or 2Gi")
    return text


def _model_source(text: str) -> str:
    ModelSource.parse(text)
    return text


def _embedder_source(text: str) -> str:
    if text != BUNDLED_EMBEDDER and not _HTTP_URL.fullmatch(text):
        raise refusal(
            f"{text!r} is no embedder",
            f"use {BUNDLED_EMBEDDER}, or the base URL of an OpenAI-compatible endpoint, "
            "like http://embeddings:8080/v1",
        )
    return text


# 40 leaves room for "-engine-" and an engine's name within a Service's 63 characters.
ObjectName = Annotated[str, Field(max_length=40), AfterValidator(_dns_label)]
EngineName = Annotated[str, Field(max_length=15), AfterValidator(_dns_label)]
ByteQuantity = Annotated[str, BeforeValidator(_byte_quantity)]
Port = Annotated[int, Field(ge=1, le=65535)]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. kind: ``bundled``, ``path`` or ``hf``; value: what follows it."""

    kind: Literal["bundled", "path", "hf"]
    value: str

    @classmethod
    def parse(cls, text: str) -> ModelSource:
        """Read ``bundled:NAME``, ``path:DIR`` or ``hf:NAME``; objects with a refusal."""
        kind, _, value = text.partition(":")
        match kind:
            case "bundled" if value in BUNDLED_MODELS:
                return cls("bundled", value)
            case "bundled":
                raise refusal(
                    f"no bundled model is named {value!r}",
                    f"use one of {', '.join(f'bundled:{name}' for name in BUNDLED_MODELS)}",
                )
            case "path" if value:
                return cls("path", value)
            case "hf" if _HUB_NAME.fullmatch(value):
                return cls("hf", value)
            case "hf":
                raise refusal(
                    f"{value!r} is no Hugging Face name",
                    "write it like hf:meta-llama/Llama-3.1-8B-Instruct",
                )
        raise refusal(
            f"{text!r} names no model", "use bundled:tinyrag, hf:ORGANISATION/NAME or path:FOLDER"
        )

    @property
    def default_name(self) -> str:
        """Served name when the manifest gives none."""
        if self.kind == "path":
            return PurePosixPath(self.value).name or "model"
        return self.value


class _Values(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        # A quoted number is refused, as the API server refuses it.
        strict=True,
    )


class ModelSpec(_Values):
    """The serving model."""

    source: Annotated[str, AfterValidator(_model_source)] = "bundled:tinyrag"
    # The name that requests give as "model"; by default the source's own.
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    # Most tokens of prompt and answer together.
    max_length: Annotated[int, Field(ge=64, le=10_000_000)] = 4096
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"

    @property
    def parsed_source(self) -> ModelSource:
        """The source in its two parts."""
        return ModelSource.parse(self.source)

    @property
    def served_name(self) -> str:
        """The name that requests give as "model"."""
        return self.name or self.parsed_source.default_name

    @model_validator(mode="after")
    def _fits(self) -> ModelSpec:
        source = self.parsed_source
        limit = BUNDLED_MODELS[source.value] if source.kind == "bundled" else self.max_length
        if self.max_length > limit:
            raise refusal(
                f"{self.max_length} is over the {limit} tokens that {self.source} knows",
                f"use {limit} or less",
                at="maxLength",
            )
        return self


class GatewaySpec(_Values):
    """The door: REST for applications."""

    # Of the Service in a cluster, of this machine's loopback under `ragcache up`.
    port: Port = 8080
    replicas: Annotated[int, Field(ge=1, le=1)] = 1


class EmbedderSpec(_Values):
    """What turns text into vectors."""

    source: Annotated[str, AfterValidator(_embedder_source)] = BUNDLED_EMBEDDER
    # The model to ask an endpoint for; only with a URL.
    model: Annotated[str, Field(min_length=1, max_length=200)] | None = None

    @model_validator(mode="after")
    def _model_goes_with_a_url(self) -> EmbedderSpec:
        bundled = self.source == BUNDLED_EMBEDDER
        if bundled and self.model is not None:
            raise refusal(
                "is given, but the bundled embedder has only one",
                "leave it out, or name an endpoint's URL as source",
                at="model",
            )
        if not bundled and self.model is None:
            raise refusal(
                "is missing: an endpoint serves many models", "name the one to ask for", at="model"
            )
        return self


class ChunkingSpec(_Values):
    """How documents are cut, for collections that do not say it themselves.

    In tokens of the serving model. window: neighbours a hit brings along on each side.
    """

    size: Annotated[int, Field(ge=16, le=4096)] = 256
    overlap: Annotated[int, Field(ge=0)] = 32
    window: Annotated[int, Field(ge=0, le=8)] = 1

    @model_validator(mode="after")
    def _overlap_is_less_than_half(self) -> ChunkingSpec:
        if 2 * self.overlap >= self.size:
            raise refusal(
                f"{self.overlap} is not less than half of size {self.size}",
                "use about an eighth of the size",
                at="overlap",
            )
        return self


class StorageSpec(_Values):
    """A volume."""

    size: ByteQuantity = "10Gi"

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return parse_quantity(self.size)


class RetrieverSpec(_Values):
    """Documents, chunks, search."""

    embedder: EmbedderSpec = EmbedderSpec()
    chunking: ChunkingSpec = ChunkingSpec()
    storage: StorageSpec = StorageSpec()


class EngineSpec(_Values):
    """One vLLM engine."""

    name: EngineName = "main"
    device: Literal["cpu"] = "cpu"
    # Bytes of the engine's own paged KV cache.
    kv_memory: ByteQuantity = "2Gi"
    # Further arguments of vLLM's server, put last so that they win.
    args: Annotated[tuple[str, ...], Field(strict=False)] = ()

    @property
    def kv_memory_gib(self) -> int:
        """KV memory in GiB, rounded up: the unit in which vLLM takes it."""
        return -(-parse_quantity(self.kv_memory) // _GIB)


class CacheStoreSpec(_Values):
    """Chunk-caches outside the engines: a memory tier above a disk tier."""

    memory: ByteQuantity = "1Gi"
    disk: StorageSpec = StorageSpec()

    @property
    def memory_bytes(self) -> int:
        """Bound of the memory tier in bytes."""
        return parse_quantity(self.memory)


class RagCacheSpec(_Values):
    """What to run."""

    model: ModelSpec = ModelSpec()
    gateway: GatewaySpec = GatewaySpec()
    retriever: RetrieverSpec = RetrieverSpec()
    engines: Annotated[tuple[EngineSpec, ...], Field(strict=False, min_length=1, max_length=1)] = (
        EngineSpec(),
    )
    cache_store: CacheStoreSpec = CacheStoreSpec()


class ObjectMeta(BaseModel):
    """What is read of an object's metadata; the API server judges the rest."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    name: ObjectName
    namespace: Annotated[str, Field(max_length=63), AfterValidator(_dns_label)] = "default"


class RagCache(BaseModel):
    """One RagCache object."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, strict=True)

    api_version: Literal["ragcache.dev/v1alpha1"]
    kind: Literal["RagCache"]
    metadata: ObjectMeta
    spec: RagCacheSpec = RagCacheSpec()
