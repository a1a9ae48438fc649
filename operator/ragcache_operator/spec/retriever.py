"""The retriever's part of a RagCache: models, index, limits and where the documents are."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Annotated, Final, Literal

from pydantic import Field
from typing_extensions import override

from ragcache_operator.spec.pods import PodTemplateSpec
from ragcache_operator.spec.values import (
    CLAIM_FOLDER,
    HTTP_URL,
    HUB_COMMIT,
    LOCAL_FOLDER,
    ApiKeySecret,
    ByteQuantity,
    ChunkingSpec,
    ExtendedResource,
    ManifestModel,
    ResourcesSpec,
    StorageSpec,
    StringPattern,
    UrlSecret,
)

BUNDLED_EMBEDDER: Final = "bundled:all-minilm-l6-v2"
BUNDLED_DIMENSION: Final = 384
"""Numbers in a vector of the bundled embedder."""
MAX_RETRIEVER_REPLICAS: Final = 5
"""More have not been tried with one PostgreSQL."""


class SearchModelSpec(ManifestModel):
    """SearchModelSpec sets a model that the retriever loads, or an endpoint that serves it."""

    @abstractmethod
    def value_of(self, kind: str) -> str:
        """Return the value of the model's source if it is of this kind. Empty for others."""

    @property
    def claim(self) -> str:
        """Name of the volume claim that has the model."""
        return self.value_of("pvc").partition("/")[0]

    @property
    def claim_folder(self) -> str:
        """Folder of the model within its volume. Empty means the volume's root."""
        return self.value_of("pvc").partition("/")[2].rstrip("/")

    @property
    def local_folder(self) -> str:
        """Folder of the model on this machine."""
        return self.value_of("path")

    @property
    def hub_name(self) -> str:
        """Name of the model on the hub."""
        return self.value_of("hf")


class EmbedderSpec(SearchModelSpec):
    """EmbedderSpec sets the embedding model, which turns text into vectors."""

    source: Annotated[
        str,
        Field(max_length=2048),
        StringPattern(
            rf"{re.escape(BUNDLED_EMBEDDER)}|hf:{HUB_COMMIT}|pvc:{CLAIM_FOLDER}|path:{LOCAL_FOLDER}"
            rf"|{HTTP_URL}",
            "embedder",
            f"use {BUNDLED_EMBEDDER}, hf:ORGANISATION/NAME with or without @COMMIT, "
            "pvc:CLAIM/FOLDER, path:FOLDER, or the base URL of an OpenAI-compatible endpoint, like "
            "http://embeddings:8080/v1",
        ),
    ] = BUNDLED_EMBEDDER
    """Source of embeddings. bundled:all-minilm-l6-v2 runs inside the retriever. So does a model in
    the form of sentence-transformers, for which the retriever needs more memory. hf: names a model
    of the Hugging Face hub, pvc: a folder on a volume, and path: a folder of this machine for
    `ragcache up`. A URL is the base URL of an OpenAI-compatible embeddings endpoint, like
    http://embeddings:8080/v1. @ and the 40 digits of a commit after a name of the hub pin what is
    loaded."""
    model: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Model name that the retriever sends to the endpoint. A URL requires it, and other sources do
    not allow it."""
    key_secret: ApiKeySecret | None = None
    """API key of the endpoint. If unset, the retriever sends no key."""

    @property
    def is_endpoint(self) -> bool:
        """Whether another service embeds."""
        return self.source.startswith("http")

    @override
    def value_of(self, kind: str) -> str:
        found, _, value = self.source.partition(":")
        return value if found == kind else ""


CROSS_ENCODER: Final = "cross-encoder"


class RerankerSpec(SearchModelSpec):
    """RerankerSpec sets the model that orders the best hits of a search again."""

    source: Annotated[
        str,
        Field(max_length=2048),
        StringPattern(
            rf"none|cross-encoder|{HTTP_URL}",
            "reranker",
            "use none, cross-encoder, or the base URL of an endpoint with /rerank, "
            "like http://reranker:8000/v1",
        ),
    ] = "none"
    """Source of new scores. none keeps the order of the search. cross-encoder is a model that reads
    question and chunk together, which runs inside the retriever. A URL is the base URL of an engine
    that serves /rerank, like http://reranker:8000/v1."""
    model: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """For cross-encoder, the model: its name on the Hugging Face hub, with or without @COMMIT,
    pvc:CLAIM/FOLDER for a folder on a volume, or path:FOLDER for a folder of this machine and
    `ragcache up`. For a URL, the model name that the retriever sends. Both require it, and the
    other sources do not allow it."""
    key_secret: ApiKeySecret | None = None
    """API key of the endpoint. If unset, the retriever sends no key."""

    @override
    def value_of(self, kind: str) -> str:
        if self.source != CROSS_ENCODER or self.model is None:
            return ""
        # A name without a kind is one of the hub.
        model = self.model if ":" in self.model else f"hf:{self.model}"
        found, _, value = model.partition(":")
        return value if found == kind else ""


CROSS_ENCODER_MODEL: Final = rf"{HUB_COMMIT}|pvc:{CLAIM_FOLDER}|path:{LOCAL_FOLDER}"
"""What names a cross-encoder, as a regular expression."""


class IndexSpec(ManifestModel):
    """IndexSpec sets the vector index of collections that set none."""

    kind: Literal["auto", "flat", "ivf", "hnsw"] = "auto"
    """Kind of the vector index. flat compares the question with every chunk. ivf compares it with
    the chunks of the nearest clusters, and hnsw walks a graph of neighbours. auto chooses by the
    number of chunks."""
    recall: Annotated[float, Field(ge=0.5, le=1, allow_inf_nan=False)] | None = None
    """Share of the nearest chunks that a search has to find, like 0.95. A search stops when this
    recall is expected. If unset, a search ends after all its stages."""
    precision: Literal["float32", "sq8"] = "float32"
    """Precision of vectors in the index. sq8 stores one byte for each number instead of four, and
    finds slightly fewer of the nearest chunks. Documents keep their exact vectors. Only the
    embedded backend has sq8."""
    expected_chunks: Annotated[int, Field(ge=1, le=1_000_000_000)] = 200_000
    """Expected number of chunks of all collections. The memory request follows from it, the
    precision and the embedder. It is no limit. With another backend the index takes no memory of
    the retriever."""


class RetrieverLimitsSpec(ManifestModel):
    """RetrieverLimitsSpec sets the limits of requests to each replica."""

    searches: Annotated[int, Field(ge=1, le=10_000)] = 256
    """Maximum number of searches at once in each replica, from their arrival to their end. Further
    ones are rejected, and clients of the gateway get 503 and Retry-After."""
    upsert_bytes: ByteQuantity = "64Mi"
    """Maximum size of the documents that a replica prepares at once. Further ones are rejected, and
    clients of the gateway get 503 and Retry-After."""


class PostgresBackendSpec(ManifestModel):
    """PostgresBackendSpec selects a PostgreSQL database with the extension pgvector."""

    url_secret: UrlSecret
    """URL of the database, like postgresql://user:password@host:5432/documents."""


class MilvusBackendSpec(ManifestModel):
    """MilvusBackendSpec selects a Milvus cluster."""

    url_secret: UrlSecret
    """URI of the cluster, like http://user:password@milvus:19530."""


class BackendSpec(ManifestModel):
    """BackendSpec sets where documents and vectors are stored. Without a field, they are on the
    retriever's own volume."""

    postgres: PostgresBackendSpec | None = None
    """Stores documents and vectors in PostgreSQL. It cannot be combined with milvus."""
    milvus: MilvusBackendSpec | None = None
    """Stores vectors in Milvus, and documents on the retriever's volume. It cannot be combined with
    postgres."""

    @property
    def kind(self) -> Literal["embedded", "postgres", "milvus"]:
        """Name of the backend."""
        if self.postgres is not None:
            return "postgres"
        return "embedded" if self.milvus is None else "milvus"

    @property
    def url_secret(self) -> UrlSecret | None:
        """Where the URL of the backend is, if it has one."""
        given = self.postgres or self.milvus
        return None if given is None else given.url_secret


class RetrieverGPUSpec(ManifestModel):
    """RetrieverGPUSpec sets the GPU of each retriever pod."""

    resource: ExtendedResource = "nvidia.com/gpu"
    """Extended resource: each pod takes one, like nvidia.com/mig-1g.10gb for a part of a GPU."""


class RetrieverSpec(ManifestModel):
    """RetrieverSpec sets the retriever, which stores documents and searches them."""

    replicas: Annotated[int, Field(ge=1, le=MAX_RETRIEVER_REPLICAS)] = 1
    """Number of retriever pods. More than one requires backend.postgres: all pods then search and
    write the documents there. Otherwise the documents are on the volume of the one pod."""
    embedder: EmbedderSpec = EmbedderSpec()
    """The embedding model. After a change, the retriever embeds all documents again."""
    reranker: RerankerSpec = RerankerSpec()
    """The reranker, which orders the best hits of a search again."""
    gpu: RetrieverGPUSpec | None = None
    """One NVIDIA GPU for an embedder and a cross-encoder that run in the retriever. Vectors are
    searched on the processor. If unset, all computes on the processor."""
    chunking: ChunkingSpec = ChunkingSpec()
    """How the retriever splits documents of collections that set no chunking."""
    index: IndexSpec = IndexSpec()
    """The vector index of collections that set none."""
    limits: RetrieverLimitsSpec = RetrieverLimitsSpec()
    """Limits of requests."""
    backend: BackendSpec = BackendSpec()
    """Where documents and vectors are stored. This field is immutable."""
    storage: StorageSpec = StorageSpec()
    """The volume of each pod with documents and vectors. Its size can grow, and its class is
    immutable."""
    resources: ResourcesSpec = ResourcesSpec()
    """Resource requests and limits of each retriever pod. By default the memory follows from
    index."""
    pod_template: PodTemplateSpec | None = None
    """Additions to the retriever's pods, which override those of spec.podTemplate."""
