"""The status of both kinds, from which ``crd`` generates the API server's schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ragcache_operator.spec.values import ManifestModel, ServerSchema

_BY_TYPE = ServerSchema({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]})
_BY_NAME = ServerSchema({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})
_BY_COLLECTION = ServerSchema(
    {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["collection"]}
)
_ATOMIC = ServerSchema({"x-kubernetes-list-type": "atomic"})
Time = Annotated[str, ServerSchema({"format": "date-time"})]


class ConditionStatus(ManifestModel):
    """ConditionStatus is one condition of the object."""

    type: Annotated[str, Field(max_length=316)]
    """Type of the condition, like Ready."""
    status: Literal["True", "False", "Unknown"]
    """Status of the condition."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """metadata.generation of the spec that the condition describes."""
    last_transition_time: Time
    """Time of the last change of status."""
    reason: Annotated[str, Field(max_length=1024)]
    """Reason for the status as one CamelCase word, for programs."""
    message: Annotated[str, Field(max_length=32768)]
    """Reason for the status as a sentence, for people."""


Conditions = Annotated[tuple[ConditionStatus, ...], Field(strict=False), _BY_TYPE]


class EndpointsStatus(ManifestModel):
    """EndpointsStatus lists the URLs of the platform."""

    gateway: str | None = None
    """Base URL of the gateway inside the cluster, for questions."""
    admin: str | None = None
    """Base URL of the gateway inside the cluster, for every path."""


class GatewayStatus(ManifestModel):
    """GatewayStatus counts the gateway's replicas."""

    replicas: int | None = None
    """Desired number of replicas."""
    ready_replicas: int | None = None
    """Number of ready replicas."""
    selector: str | None = None
    """Label selector of the gateway's pods. Autoscalers use it."""


class EngineStatus(ManifestModel):
    """EngineStatus counts the replicas of one engine group."""

    name: str
    """Name of the group, as in spec.engines."""
    model: str | None = None
    """Name of the model that it serves."""
    role: str | None = None
    """Role of the group, as in spec.engines."""
    replicas: int | None = None
    """Desired number of replicas."""
    ready_replicas: int | None = None
    """Number of ready replicas."""


class RemakeStatus(ManifestModel):
    """RemakeStatus is the progress of preparing the documents of a collection again."""

    collection: str
    """Name of the collection."""
    documents_done: int | None = None
    """Number of documents that have been prepared again."""
    documents: int | None = None
    """Number of documents in the collection."""
    reason: str | None = None
    """What has changed: chunking, tokenizer or embedder, or several of them."""


class RetrieverStatus(ManifestModel):
    """RetrieverStatus is the state of the retriever, as its pods said last."""

    replicas: int | None = None
    """Desired number of replicas."""
    ready_replicas: int | None = None
    """Number of ready replicas."""
    remake_progress: str | None = None
    """Number of documents that have been prepared again in all collections, like "12 of 40". It is
    unset when no collection is prepared again."""
    remakes: Annotated[tuple[RemakeStatus, ...], Field(strict=False), _BY_COLLECTION] = ()
    """Collections whose documents are prepared again in the background, after a change of chunking,
    tokenizer or embedder. Searches use the earlier chunks meanwhile. At most 50, by name."""


class CacheStoreStatus(ManifestModel):
    """CacheStoreStatus counts the cache store's shards."""

    shards: int | None = None
    """Desired number of shards."""
    ready_shards: int | None = None
    """Number of ready shards."""


class CacheUsageStatus(ManifestModel):
    """CacheUsageStatus shows how much the cache store holds and how often reads hit."""

    hit_rate: str | None = None
    """Share of reads that found a variant, from 0 to 1 with two digits, like 0.83."""
    num_bytes: Annotated[int | None, Field(alias="bytes")] = None
    """Number of bytes that the variants take on the disks of all shards."""


class RagCacheStatus(ManifestModel):
    """RagCacheStatus is the last state of a RagCache that the operator observed."""

    observed_generation: int | None = None
    """metadata.generation of the spec that this status describes."""
    phase: Literal["Pending", "Progressing", "Ready", "Degraded", "Refused", "Deleting"] | None = (
        None
    )
    """Summary of the conditions. Ready means that the self-test passed. Degraded means that some
    replicas are not ready. Refused means that the operator does not apply the spec; the condition
    Accepted tells why."""
    api_key_secret: str | None = None
    """Secret that the operator created with an API key for administration, in its entry admin-key.
    Unset if spec.gateway.auth names a Secret or requires no keys."""
    conditions: Conditions = ()
    """The conditions Accepted, CacheStoreReady, RetrieverReady, EnginesReady, GatewayReady,
    SelfTestPassed and Ready. With spec.reuse.mode blend also BlendVerified, which tells whether a
    quality measurement of this model has passed. After a size of volumes was raised also
    VolumesResized, which tells whether they have grown. After an engine was on a processor without
    instructions for the model's data type also DataTypeSupported. With GPUs also
    GPUsAvailable, which tells whether each pod that asks for one has it."""
    progress: str | None = None
    """What the operator waits for, like "engine: loading the model". It is unset when nothing is
    in progress."""
    model: str | None = None
    """Model name that requests send as "model"."""
    endpoints: EndpointsStatus | None = None
    """URLs of the platform."""
    gateway: GatewayStatus | None = None
    """Replicas of the gateway."""
    engines: Annotated[tuple[EngineStatus, ...], Field(strict=False), _BY_NAME] = ()
    """Replicas of each engine group."""
    engines_ready: str | None = None
    """Ready and desired number of engine replicas in all groups, like 1/2."""
    retriever: RetrieverStatus | None = None
    """Replicas of the retriever, and the progress of remakes."""
    cache_store: CacheStoreStatus | None = None
    """Shards of the cache store."""
    cache: CacheUsageStatus | None = None
    """Usage of the cache store, as last observed."""


class RagCollectionStatus(ManifestModel):
    """RagCollectionStatus is the last state of a RagCollection that the operator observed."""

    observed_generation: int | None = None
    """metadata.generation of the spec that this status describes."""
    phase: str | None = None
    """Summary of the conditions."""
    conditions: Conditions = ()
    """The conditions Ready and Synced."""
    documents: int | None = None
    """Number of documents in the collection that came from the sources."""
    chunks: int | None = None
    """Number of chunks in these documents."""
    progress: str | None = None
    """Progress of the running sync, like "12 of 40". It is unset when no sync runs."""
    last_sync_time: Time | None = None
    """Time of the last successful sync."""
    source_revision: str | None = None
    """Revision of the sources at the last successful sync."""
    failures: Annotated[tuple[str, ...], Field(strict=False), _ATOMIC] = ()
    """Documents that the last sync could not write, each with the reason."""
    warning_count: int | None = None
    """Number of documents that were not read in full, or with an assumption."""
    warnings: Annotated[tuple[str, ...], Field(strict=False), _ATOMIC] = ()
    """The first of these documents, each with what was not read, such as scanned pages."""
