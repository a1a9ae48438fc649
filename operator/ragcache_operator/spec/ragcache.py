"""The RagCache object (DESIGN §7) as typed, frozen values. A field exists when it works.

``manifest`` makes these from YAML; the builders make Kubernetes objects from them; ``crd`` makes
the API server's schema. The string below a field is its documentation in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field

from ragcache_operator.spec.quantity import parse_quantity
from ragcache_operator.spec.values import (
    HTTP_URL,
    RELATIVE_PATH,
    SUBDOMAIN,
    ApiKeySecret,
    ByteQuantity,
    ChunkingSpec,
    EngineName,
    ForeignName,
    HostName,
    LabelKey,
    LabelValue,
    ManifestModel,
    Namespace,
    ObjectMeta,
    Port,
    Replicas,
    ResourcesSpec,
    SecretKey,
    ServerSchema,
    StorageSpec,
    StringPattern,
    validation_error,
)

KIND = "RagCache"

COMPONENTS = ("gateway", "retriever", "engine", "cachestore")
BUNDLED_MODELS = {"tinyrag": 4096}
"""Models that come with RagCache, and the most tokens each was trained for."""
BUNDLED_EMBEDDER = "bundled:all-minilm-l6-v2"

_GIB = 1 << 30
_HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?"
_CLAIM = rf"{SUBDOMAIN}(/{RELATIVE_PATH})?"
_IMAGE = r"[A-Za-z0-9][A-Za-z0-9._/:@-]*"
_FOLDER = r"[^\n]+"
_MODEL_SOURCE: Final = "|".join(
    [
        *(f"bundled:{name}" for name in BUNDLED_MODELS),
        f"hf:{_HUB_NAME}",
        f"path:{_FOLDER}",
        f"pvc:{_CLAIM}",
        f"image:{_IMAGE}",
    ]
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. value: what follows the kind."""

    kind: Literal["bundled", "hf", "path", "pvc", "image"]
    value: str

    @classmethod
    def parse(cls, text: str) -> ModelSource:
        """Read ``KIND:VALUE``; objects with a refusal."""
        kind, _, value = text.partition(":")
        match kind:
            case "bundled" if value in BUNDLED_MODELS:
                return cls("bundled", value)
            case "bundled":
                raise validation_error(
                    f"no bundled model is named {value!r}",
                    f"use one of {', '.join(f'bundled:{name}' for name in BUNDLED_MODELS)}",
                )
            case "path" if re.fullmatch(_FOLDER, value):
                return cls("path", value)
            case "hf" if re.fullmatch(_HUB_NAME, value):
                return cls("hf", value)
            case "hf":
                raise validation_error(
                    f"{value!r} is no Hugging Face name",
                    "write it like hf:meta-llama/Llama-3.1-8B-Instruct",
                )
            case "pvc" if re.fullmatch(_CLAIM, value, re.ASCII):
                return cls("pvc", value)
            case "pvc":
                raise validation_error(
                    f"{value!r} is no volume claim and folder in it",
                    "write it like pvc:models/llama-8b, without '..'",
                )
            case "image" if re.fullmatch(_IMAGE, value):
                return cls("image", value)
            case "image":
                raise validation_error(
                    f"{value!r} is no image reference",
                    "write it like image:registry.example.com/models/llama-8b:1",
                )
        raise validation_error(
            f"{text!r} names no model",
            "use bundled:tinyrag, hf:ORGANISATION/NAME, pvc:CLAIM/FOLDER, image:REFERENCE "
            "or path:FOLDER",
        )

    @property
    def claim(self) -> str:
        """Name of a ``pvc`` source's volume claim."""
        return self.value.partition("/")[0]

    @property
    def folder(self) -> str:
        """Folder of a ``pvc`` source within its volume; empty: the volume's root."""
        return self.value.partition("/")[2].rstrip("/")

    @property
    def default_name(self) -> str:
        """Served name when the manifest gives none."""
        match self.kind:
            case "path" | "pvc":
                return PurePosixPath(self.value).name or "model"
            case "image":
                return PurePosixPath(self.value.partition("@")[0]).name.partition(":")[0]
        return self.value


def _model_source(text: str) -> str:
    ModelSource.parse(text)
    return text


class ModelSpec(ManifestModel):
    """The serving model."""

    source: Annotated[
        str,
        Field(max_length=512),
        AfterValidator(_model_source),
        ServerSchema({"pattern": f"^(?:{_MODEL_SOURCE})$"}),
    ] = "bundled:tinyrag"
    """Where the weights come from: bundled:tinyrag (comes with RagCache), hf:ORGANISATION/NAME
    (the Hugging Face hub), pvc:CLAIM/FOLDER (a volume claim of this namespace, read only),
    image:REFERENCE (an OCI image mounted as a volume, from Kubernetes 1.35 on) or path:FOLDER (this
    machine's disk; only under `ragcache up`)."""
    token_secret: SecretKey | None = None
    """Token for a gated model on the Hugging Face hub; only with an hf: source."""
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """The name that requests give as "model". Without it, the source's own."""
    max_length: Annotated[int, Field(ge=64, le=10_000_000)] = 4096
    """Most tokens of prompt and answer together. A longer one needs more kvMemory."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of weights and KV cache. auto: as the weights were saved."""

    @property
    def parsed_source(self) -> ModelSource:
        """The source in its two parts."""
        return ModelSource.parse(self.source)

    @property
    def served_name(self) -> str:
        """The name that requests give as "model"."""
        return self.name or self.parsed_source.default_name


class GatewayAutoscalingSpec(ManifestModel):
    """Copies by load: never fewer than replicas."""

    max_replicas: Replicas
    """Most copies to run; at least replicas, which is the fewest."""
    cpu_percent: Annotated[int, Field(ge=1, le=1000)] = 70
    """Use of the requested CPU, in percent over all copies, that the number of copies aims at."""


class EngineAutoscalingSpec(ManifestModel):
    """Copies by waiting requests: never fewer than replicas."""

    max_replicas: Replicas
    """Most copies to run; at least replicas, which is the fewest."""
    queue_depth: Annotated[int, Field(ge=1, le=1000)] = 4
    """Waiting requests per copy that the number of copies aims at."""


class IngressSpec(ManifestModel):
    """An Ingress in front of the gateway."""

    host: HostName
    """Host name under which applications reach the gateway, like rag.example.com."""
    class_name: ForeignName | None = None
    """Ingress class. Without it, the cluster's default class."""
    tls_secret: ForeignName | None = None
    """Secret of type kubernetes.io/tls with the host's certificate. Without it, plain HTTP."""


class HTTPRouteSpec(ManifestModel):
    """An HTTPRoute of the Gateway API in front of the gateway."""

    gateway: ForeignName
    """Name of the Gateway object that the route attaches to."""
    gateway_namespace: Namespace | None = None
    """Namespace of that Gateway object. Without it, the one of this object."""
    hostnames: Annotated[
        tuple[HostName, ...],
        Field(strict=False, max_length=16),
        ServerSchema({"x-kubernetes-list-type": "set"}),
    ] = ()
    """Host names the route answers to. Empty: all that the Gateway object listens for."""


class GatewaySpec(ManifestModel):
    """The door: REST for applications."""

    port: Port = 8080
    """Port of the gateway's Service in a cluster, of 127.0.0.1 under `ragcache up`."""
    replicas: Replicas = 1
    """Copies of the gateway; with autoscaling, the fewest."""
    autoscaling: GatewayAutoscalingSpec | None = None
    """Copies by CPU use, between replicas and maxReplicas. Without it, always replicas.
    Needs a metrics API in the cluster."""
    resources: ResourcesSpec = ResourcesSpec()
    """What each copy's pod asks for, in place of the defaults."""
    ingress: IngressSpec | None = None
    """An Ingress that leads from outside the cluster to the gateway. Excludes httpRoute."""
    http_route: HTTPRouteSpec | None = None
    """An HTTPRoute that leads from a Gateway object to the gateway. Excludes ingress."""


class EmbedderSpec(ManifestModel):
    """What turns text into vectors."""

    source: Annotated[
        str,
        Field(max_length=2048),
        StringPattern(
            rf"{re.escape(BUNDLED_EMBEDDER)}|{HTTP_URL}",
            "embedder",
            f"use {BUNDLED_EMBEDDER}, or the base URL of an OpenAI-compatible endpoint, "
            "like http://embeddings:8080/v1",
        ),
    ] = BUNDLED_EMBEDDER
    """bundled:all-minilm-l6-v2, which runs inside the retriever, or the base URL of an
    OpenAI-compatible embeddings endpoint, like http://embeddings:8080/v1."""
    model: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """The model to ask the endpoint for; needed with a URL, and only then allowed."""
    key_secret: ApiKeySecret | None = None
    """API key of the endpoint; only with a URL. Without it, requests carry none."""


class RetrieverSpec(ManifestModel):
    """Documents, chunks, search. Always one pod: its documents live on one volume."""

    embedder: EmbedderSpec = EmbedderSpec()
    """What turns text into vectors. Another one makes the retriever embed all documents anew."""
    chunking: ChunkingSpec = ChunkingSpec()
    """How documents are cut, for collections that do not say it themselves."""
    storage: StorageSpec = StorageSpec()
    """The volume with documents and vectors. Cannot change after the object was made."""
    resources: ResourcesSpec = ResourcesSpec()
    """What the pod asks for, in place of the defaults."""


class EngineSpec(ManifestModel):
    """vLLM engines of one kind."""

    name: EngineName = "main"
    """Name of the group within the RagCache; part of the names of its objects."""
    replicas: Replicas = 1
    """Copies of this engine; with autoscaling, the fewest."""
    device: Literal["cpu"] = "cpu"
    """What the engine computes on."""
    kv_memory: ByteQuantity = "2Gi"
    """Bytes of the engine's own paged KV cache, rounded up to whole GiB. What does not fit comes
    from the cache store."""
    host_tier: ByteQuantity | None = None
    """Bytes of host memory in which each copy keeps the chunk-caches it asks for most, above the
    cache store. Without it, all of them come from the store."""
    args: Annotated[
        tuple[Annotated[str, Field(max_length=512)], ...],
        Field(strict=False, max_length=64),
        ServerSchema({"x-kubernetes-list-type": "atomic"}),
    ] = ()
    """Further arguments of vLLM's server, put last so that they win."""
    resources: ResourcesSpec = ResourcesSpec()
    """What each copy's pod asks for, in place of what follows from kvMemory and hostTier."""
    autoscaling: EngineAutoscalingSpec | None = None
    """Copies by waiting requests, between replicas and maxReplicas. Without it, always replicas.
    Needs a custom metrics API in the cluster that serves vLLM's metrics."""

    @property
    def kv_memory_bytes(self) -> int:
        """KV memory in bytes, as given."""
        return parse_quantity(self.kv_memory)

    @property
    def kv_memory_gib(self) -> int:
        """KV memory in GiB, rounded up: the unit in which vLLM takes it."""
        return -(-self.kv_memory_bytes // _GIB)

    @property
    def host_tier_bytes(self) -> int:
        """Host tier in bytes; 0 for none."""
        return 0 if self.host_tier is None else parse_quantity(self.host_tier)


class ReplicationSpec(ManifestModel):
    """Copies of what is asked for most."""

    enabled: bool = True
    """Whether a busy shard copies the chunk-caches that make up much of what it serves to another
    shard, and drops the copies when they no longer do. Of no effect with one shard."""


class PrecisionSpec(ManifestModel):
    """How numbers of chunk-caches are held, keys and values each in their own way.

    Only ways that lose nothing are offered: what loses precision never stands for a computation,
    so that exact reuse would find nothing there."""

    key: Literal["native", "packed"] = "native"
    """Keys. native: as computed. packed: the same numbers, bit for bit, in about three quarters of
    the bytes where they are bfloat16, at the price of packing once and unpacking at every read."""
    value: Literal["native", "packed"] = "native"
    """Values, in the same ways."""


class CacheStoreSpec(ManifestModel):
    """Chunk-caches outside the engines: a memory tier above a disk tier."""

    shards: Replicas = 1
    """Pods that share the chunk-caches among them, each with the memory and the disk below."""
    memory: ByteQuantity = "1Gi"
    """Bytes of the memory tier of each shard."""
    disk: StorageSpec = StorageSpec()
    """The volume of each shard's disk tier. Cannot change after the object was made."""
    policy: Literal["score", "pgdsf", "gdsf", "lru", "lfu", "fifo", "s3fifo", "cachecraft"] = (
        "score"
    )
    """What goes when a tier is full. score: what saves the fewest seconds per byte, with recent
    uses counting most. The others are policies of the literature, to compare with."""
    admission: Literal["always", "secondTouch", "score"] = "always"
    """What is written to the disk. always: everything, in the background. secondTouch: what is
    asked for after it was put. score: what is worth more than what would have to go for it; only
    with policy score. What is not written is lost when it leaves memory, or when the shard
    restarts."""
    precision: PrecisionSpec = PrecisionSpec()
    """How numbers are held."""
    replication: ReplicationSpec = ReplicationSpec()
    """Copies on further shards of what is asked for most."""
    resources: ResourcesSpec = ResourcesSpec()
    """What each shard's pod asks for, in place of what follows from memory."""

    @property
    def memory_bytes(self) -> int:
        """Bound of the memory tier of one shard in bytes."""
        return parse_quantity(self.memory)


class ReuseSpec(ManifestModel):
    """Which chunk-caches stand for a computation, where a request does not say it itself."""

    mode: Literal["exact", "blend"] = "exact"
    """exact: a chunk-cache that was computed behind just the tokens that stand before the chunk
    now, so that it is what would be computed. blend: any of the same chunk, also one that was
    computed behind other chunks; a share of its tokens is computed anew. Answers may then differ
    from those of a full computation."""
    max_recompute: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.2
    """Most that blend computes anew, as a share of the tokens taken from behind other chunks. More
    takes longer and leaves less that differs from a full computation. It holds for requests that
    ask for blend themselves, too."""
    quality: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """What the answers of blends are worth at least, on average: their ROUGE-L F1 with those of
    full computations, such as 0.95. In idle time the gateway asks recent questions again, in full
    and with more or less computed anew. From eight of them on it blends with the least that reaches
    this, maxRecompute at most, and where that is not enough it reuses exactly. Until then it blends
    as without a quality. It holds for requests that ask for blend themselves, too. Engines are
    started anew when it is set or removed."""
    precompute: bool = False
    """Whether KV is computed ahead while no question of the gateway is answered, at the lowest
    priority: under blend the chunks of a document when it is written, so that even the first
    question about them finds them; and in either mode what questions had to compute again and again
    and the store does not hold, under exact that is the document that stood first. Engines are
    started anew when this changes."""


class TolerationSpec(ManifestModel):
    """A taint that pods bear, as in a pod's own tolerations."""

    key: LabelKey | None = None
    """Key of the taint. Without it and with operator Exists, every taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Equal: key and value are those of the taint. Exists: the key is."""
    value: LabelValue | None = None
    """Value of the taint; only with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Without it, every effect."""
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None
    """Seconds for which a NoExecute taint is borne. Without it, for ever."""


class PullSecret(ManifestModel):
    """A Secret with a registry's credentials."""

    name: ForeignName
    """Name of a Secret of type kubernetes.io/dockerconfigjson in the namespace of this object."""


class SchedulingSpec(ManifestModel):
    """Where pods may run and how they start, for all parts."""

    priority_class_name: ForeignName | None = None
    """Priority class of every pod. Without it, the cluster's default."""
    node_selector: Annotated[
        Mapping[LabelKey, LabelValue],
        Field(max_length=32),
        ServerSchema({"x-kubernetes-map-type": "atomic"}),
    ] = {}
    """Labels that a node must have for any pod to run on it."""
    tolerations: Annotated[
        tuple[TolerationSpec, ...],
        Field(strict=False, max_length=32),
        ServerSchema({"x-kubernetes-list-type": "atomic"}),
    ] = ()
    """Taints of nodes that every pod bears."""
    image_pull_secrets: Annotated[
        tuple[PullSecret, ...],
        Field(strict=False, max_length=16),
        ServerSchema({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = ()
    """Secrets with credentials of the registry that the images come from."""


class LabelRequirement(ManifestModel):
    """One condition on an object's labels."""

    key: LabelKey
    """Key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How the label's value relates to values."""
    values: Annotated[
        tuple[LabelValue, ...],
        Field(strict=False, max_length=32),
        ServerSchema({"x-kubernetes-list-type": "atomic"}),
    ] = ()
    """Values to compare with; some for In and NotIn, none for Exists and DoesNotExist."""


class LabelSelector(ManifestModel):
    """Objects by their labels, all conditions at once. Empty: every object."""

    match_labels: Annotated[
        Mapping[LabelKey, LabelValue],
        Field(max_length=32),
        ServerSchema({"x-kubernetes-map-type": "atomic"}),
    ] = {}
    """Labels that an object must have."""
    match_expressions: Annotated[
        tuple[LabelRequirement, ...],
        Field(strict=False, max_length=32),
        ServerSchema({"x-kubernetes-list-type": "atomic"}),
    ] = ()
    """Further conditions on an object's labels."""


class ClientSpec(ManifestModel):
    """Pods that may talk to the gateway; with both selectors, pods that match both."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    namespace_selector: LabelSelector | None = None
    """Namespaces of the pods. Without it, the namespace of this object."""
    pod_selector: LabelSelector | None = None
    """The pods. Without it, all of the namespaces that namespaceSelector names."""


class NetworkPolicySpec(ManifestModel):
    """Who may talk to whom."""

    enabled: bool = True
    """Whether NetworkPolicies let only the right parts talk to each other. They take effect where
    the cluster's network plugin enforces them."""
    clients: Annotated[
        tuple[ClientSpec, ...],
        Field(strict=False, max_length=32),
        ServerSchema({"x-kubernetes-list-type": "atomic"}),
    ] = ()
    """Who may talk to the gateway. Empty: everyone."""


class OtlpSpec(ManifestModel):
    """A collector of OpenTelemetry."""

    endpoint: Annotated[
        str,
        Field(max_length=2048),
        StringPattern(HTTP_URL, "URL of a collector", "write it like http://collector:4318"),
    ]
    """Base URL of the collector, which takes OTLP over HTTP below it: /v1/metrics and /v1/traces,
    like http://collector:4318."""


class TelemetrySpec(ManifestModel):
    """Where the parts say what they do."""

    otlp: OtlpSpec | None = None
    """A collector of OpenTelemetry that gets metrics and spans. Without it, none are made."""


class RagCacheSpec(ManifestModel):
    """What to run."""

    model: ModelSpec = ModelSpec()
    """The model that answers."""
    gateway: GatewaySpec = GatewaySpec()
    """The door: REST for applications, compatible with OpenAI's."""
    retriever: RetrieverSpec = RetrieverSpec()
    """Documents, chunks, search. One pod with one volume."""
    engines: Annotated[
        tuple[EngineSpec, ...],
        Field(strict=False, min_length=1, max_length=16),
        ServerSchema({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = (EngineSpec(),)
    """Groups of vLLM engines, each with its own size and number of copies."""
    cache_store: CacheStoreSpec = CacheStoreSpec()
    """Chunk-caches outside the engines: a memory tier above a disk tier."""
    reuse: ReuseSpec = ReuseSpec()
    """Which chunk-caches stand for a computation, where a request does not say it itself."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """Where pods may run and how they start, for all parts."""
    data_policy: Literal["Retain", "Delete"] = "Retain"
    """What happens to the volumes with documents and chunk-caches when this object is deleted.
    Retain: their claims stay, and an object of the same name finds them. Delete: they go too."""
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    """Who may talk to whom."""
    telemetry: TelemetrySpec = TelemetrySpec()
    """Where the parts say what they do."""


class RagCache(ManifestModel):
    """A platform that answers questions about documents and reuses the KV cache of what it
    retrieves: gateway, retriever, engines and cache store."""

    api_version: Literal["ragcache.dev/v1alpha1"]
    kind: Literal["RagCache"]
    metadata: ObjectMeta
    spec: RagCacheSpec = RagCacheSpec()
    """What to run. Every field has a default: an empty spec is a whole platform."""
