"""What the operator reports of both objects, typed for the API server's schema and its readers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ragcache_operator.spec.values import ManifestModel, ServerSchema

_BY_TYPE = ServerSchema({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]})
_BY_NAME = ServerSchema({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})
_ATOMIC = ServerSchema({"x-kubernetes-list-type": "atomic"})
Time = Annotated[str, ServerSchema({"format": "date-time"})]


class ConditionStatus(ManifestModel):
    """One thing that is or is not so."""

    type: Annotated[str, Field(max_length=316)]
    """What the condition is about, like Ready."""
    status: Literal["True", "False", "Unknown"]
    """Whether it is so."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """metadata.generation of the spec that the condition speaks of."""
    last_transition_time: Time
    """When status last changed."""
    reason: Annotated[str, Field(max_length=1024)]
    """Why, in one word for programs."""
    message: Annotated[str, Field(max_length=32768)]
    """Why, in words for people."""


Conditions = Annotated[tuple[ConditionStatus, ...], Field(strict=False), _BY_TYPE]


class EndpointsStatus(ManifestModel):
    """Where applications find the platform."""

    gateway: str | None = None
    """Base URL of the gateway within the cluster."""


class GatewayStatus(ManifestModel):
    """The gateway's copies."""

    replicas: int | None = None
    """Copies that are to run now."""
    ready_replicas: int | None = None
    """Copies that take requests."""
    selector: str | None = None
    """Labels of the gateway's pods, for whoever scales it."""


class EngineStatus(ManifestModel):
    """The copies of one group of engines."""

    name: str
    """Name of the group, as in spec.engines."""
    replicas: int | None = None
    """Copies that are to run now."""
    ready_replicas: int | None = None
    """Copies that take requests."""


class CacheStoreStatus(ManifestModel):
    """The cache store's shards."""

    shards: int | None = None
    """Shards that are to run now."""
    ready_shards: int | None = None
    """Shards that take requests."""


class CacheUsageStatus(ManifestModel):
    """What the cache store was last seen to hold."""

    hit_rate: str | None = None
    """Share of reads that found their chunk-cache, in [0, 1] with two digits, like 0.83."""
    num_bytes: Annotated[int | None, Field(alias="bytes")] = None
    """Bytes of chunk-caches on all shards' disks."""


class RagCacheStatus(ManifestModel):
    """What the operator last saw of a RagCache."""

    observed_generation: int | None = None
    """metadata.generation of the spec that this status speaks of."""
    phase: Literal["Pending", "Progressing", "Ready", "Degraded", "Refused", "Deleting"] | None = (
        None
    )
    """The conditions in one word. Ready: a question was answered. Degraded: answers go on with
    fewer copies than asked for. Refused: the spec is not acted on, see the condition Accepted."""
    conditions: Conditions = ()
    """Accepted, CacheStoreReady, RetrieverReady, EnginesReady, GatewayReady, SelfTestPassed and
    Ready, each with reason and message."""
    progress: str | None = None
    """What is being waited for, like "engine: loading the model"; absent when nothing is."""
    model: str | None = None
    """The name that requests give as "model"."""
    endpoints: EndpointsStatus | None = None
    """Where applications find the platform."""
    gateway: GatewayStatus | None = None
    """The gateway's copies."""
    engines: Annotated[tuple[EngineStatus, ...], Field(strict=False), _BY_NAME] = ()
    """The copies of each group of engines."""
    engines_ready: str | None = None
    """Copies of all engines that are ready, of those that are to run, like 1/2."""
    cache_store: CacheStoreStatus | None = None
    """The cache store's shards."""
    cache: CacheUsageStatus | None = None
    """What the cache store was last seen to hold."""


class RagCollectionStatus(ManifestModel):
    """What the operator last saw of a RagCollection."""

    observed_generation: int | None = None
    """metadata.generation of the spec that this status speaks of."""
    phase: str | None = None
    """The conditions in one word."""
    conditions: Conditions = ()
    """Ready and Synced, each with reason and message."""
    documents: int | None = None
    """Documents in the collection that came from the sources."""
    chunks: int | None = None
    """Chunks that these documents were cut into."""
    progress: str | None = None
    """How far the sync that runs now is, like "12 of 40"; absent when none runs."""
    last_sync_time: Time | None = None
    """When a sync last ended well."""
    source_revision: str | None = None
    """Hash of what the sources held then."""
    failures: Annotated[tuple[str, ...], Field(strict=False), _ATOMIC] = ()
    """Documents that the last sync could not bring, each with the reason."""
