"""The RagCache object as typed, frozen values.

``manifest`` parses YAML into these models, the builders turn them into Kubernetes objects, and
``crd`` generates the API server's schema. The string below a field is its documentation everywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from ragcache_core.eviction import PolicyName
from ragcache_operator.spec.cluster import NetworkPolicySpec, TelemetrySpec, TlsSpec
from ragcache_operator.spec.oidc import OidcIssuerSpec
from ragcache_operator.spec.pods import (
    EnvVarSpec,
    PodTemplateSpec,
    ProxySpec,
    SyncJobsSpec,
    TrustedCASpec,
)
from ragcache_operator.spec.quantity import parse_quantity
from ragcache_operator.spec.retriever import RetrieverSpec
from ragcache_operator.spec.values import (
    CLAIM_FOLDER,
    HUB_COMMIT,
    LOCAL_FOLDER,
    Annotations,
    ApiKeySecret,
    ByteQuantity,
    EngineName,
    EngineUrl,
    ExtendedResource,
    ForeignName,
    HostName,
    HostPattern,
    IpBlock,
    LabelKey,
    ManifestModel,
    Namespace,
    ObjectMeta,
    Port,
    Replicas,
    ResourcesSpec,
    SecretEntry,
    SecretKey,
    ServedName,
    ServerList,
    ServerSchema,
    StorageSpec,
    StringPattern,
    WebOrigin,
    validation_error,
)

KIND = "RagCache"

COMPONENTS = ("gateway", "retriever", "engine", "cachestore")
BUNDLED_MODELS = {"smollm2": 8192, "tinyrag": 4096}
"""Models that need no hub, each with its maximum context length in tokens. The images have them,
and `ragcache up` fetches them."""
BUNDLED_KV_HEADS = {"smollm2": 3, "tinyrag": 6}
"""Their KV heads, which the ranks of an engine share."""

_GIB = 1 << 30
RANK_SHARED_BYTES = 512 << 20
"""/dev/shm of each rank: two of vLLM's message queues of 160 MiB, and NCCL's buffers."""
_DEFAULT_KV_GIB = 2
"""The paged KV cache of an engine on a processor."""
# The full name of a flag, because argparse accepts short ones. A key of its value needs a value.
UnsafeArgument = Annotated[
    str,
    Field(max_length=512),
    StringPattern(
        r"--[a-z0-9]+(-[a-z0-9]+)*((\.[^=\n]+)?=[^\n]*)?",
        "argument of vLLM's server",
        "write the flag's full name and its value as one item, like --model-impl=transformers",
    ),
]
_IMAGE = r"[A-Za-z0-9][A-Za-z0-9._/:@-]*"
_MODEL_SOURCE: Final = "|".join(
    [
        *(f"bundled:{name}" for name in BUNDLED_MODELS),
        f"hf:{HUB_COMMIT}",
        f"path:{LOCAL_FOLDER}",
        f"pvc:{CLAIM_FOLDER}",
        f"image:{_IMAGE}",
    ]
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: ``KIND:VALUE`` of a manifest."""

    kind: Literal["bundled", "hf", "path", "pvc", "image"]
    value: str

    @classmethod
    def parse(cls, text: str) -> ModelSource:
        """Parse ``KIND:VALUE``, or raise a validation error."""
        kind, _, value = text.partition(":")
        match kind:
            case "bundled" if value in BUNDLED_MODELS:
                return cls("bundled", value)
            case "bundled":
                raise validation_error(
                    f"no bundled model is named {value!r}",
                    f"use one of {', '.join(f'bundled:{name}' for name in BUNDLED_MODELS)}",
                )
            case "path" if re.fullmatch(LOCAL_FOLDER, value):
                return cls("path", value)
            case "hf" if re.fullmatch(HUB_COMMIT, value):
                return cls("hf", value)
            case "hf":
                raise validation_error(
                    f"{value!r} is not a Hugging Face model name",
                    "write it like hf:meta-llama/Llama-3.1-8B-Instruct, with @ and 40 hexadecimal "
                    "digits for a commit",
                )
            case "pvc" if re.fullmatch(CLAIM_FOLDER, value, re.ASCII):
                return cls("pvc", value)
            case "pvc":
                raise validation_error(
                    f"{value!r} is not CLAIM or CLAIM/FOLDER",
                    "write it like pvc:models/llama-8b, without '..'",
                )
            case "image" if re.fullmatch(_IMAGE, value):
                return cls("image", value)
            case "image":
                raise validation_error(
                    f"{value!r} is not an image reference",
                    "write it like image:registry.example.com/models/llama-8b:1",
                )
        raise validation_error(
            f"{text!r} names no model",
            "use bundled:smollm2, hf:ORGANISATION/NAME, pvc:CLAIM/FOLDER, image:REFERENCE "
            "or path:FOLDER",
        )

    @property
    def claim(self) -> str:
        """Name of the volume claim of a ``pvc`` source."""
        return self.value.partition("/")[0]

    @property
    def folder(self) -> str:
        """Folder of a ``pvc`` source within its volume. Empty means the volume's root."""
        return self.value.partition("/")[2].rstrip("/")

    @property
    def default_name(self) -> str:
        """Served name that applies when the manifest gives none."""
        match self.kind:
            case "path" | "pvc":
                return PurePosixPath(self.value).name or "model"
            case "image":
                return PurePosixPath(self.value.partition("@")[0]).name.partition(":")[0]
        return self.value.partition("@")[0]


def _model_source(text: str) -> str:
    ModelSource.parse(text)
    return text


class ModelCacheSpec(ManifestModel):
    """ModelCacheSpec sets where engines keep what they downloaded and compiled."""

    claim: ForeignName
    """Volume claim of this namespace, which engine pods mount writable. It holds the models of the
    hub, and what torch.compile and Triton compiled, so that a restart repeats neither. Several
    engines need a claim that several nodes may mount, and may share one. A workload that can write
    to it can run code in the engines. `ragcache up` uses the caches of this machine instead."""


class ModelSpec(ManifestModel):
    """ModelSpec sets the model that the engines serve."""

    source: Annotated[
        str,
        Field(max_length=512),
        AfterValidator(_model_source),
        ServerSchema({"pattern": f"^(?:{_MODEL_SOURCE})$"}),
    ] = "bundled:smollm2"
    """Source of the model's weights. bundled:smollm2 is SmolLM2-135M-Instruct, a small general
    model that the images contain. bundled:tinyrag is a test model. hf:ORGANISATION/NAME is a model
    of the Hugging Face hub, and hf:ORGANISATION/NAME@COMMIT pins what is loaded of it. Without a
    commit, its owner may change that. pvc:CLAIM/FOLDER is a volume claim of this namespace, which
    pods mount read-only. image:REFERENCE is an OCI image, which pods mount as a volume; it needs
    Kubernetes 1.35. path:FOLDER is a local folder, for `ragcache up` only."""
    token_secret: SecretKey | None = None
    """Token for a gated model of the Hugging Face hub. It requires an hf: source."""
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Model name that requests send as "model". If unset, the name follows from source."""
    max_length: Annotated[int, Field(ge=64, le=10_000_000)] = 4096
    """Maximum number of tokens in prompt and answer together. A larger value needs more
    kvMemory."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of the weights and the KV cache. auto uses the data type of the saved weights, and
    16 bits for float32. On processors without AVX-512, 16 bits are several times slower than
    float32: `ragcache up` then takes float32 for auto. On Kubernetes the condition
    DataTypeSupported names such engines, and the field is yours to set."""
    weights: ByteQuantity | None = None
    """Size of the weights in memory, which the memory request of each engine includes. If unset, it
    is known for bundled models. For other models it is a guess from the number of parameters in the
    name, like 8B, at two bytes each, or four with float32. Without such a number it is 0. An engine
    whose request does not hold the real weights does not start, and reports their size. Nothing
    corrects a guess that is too high."""
    cache: ModelCacheSpec | None = None
    """Keeps downloads and compiled code of the engines across restarts. If unset, each start of an
    engine pod downloads an hf: model again, and compiles again on a GPU."""

    @property
    def parsed_source(self) -> ModelSource:
        """The source as kind and value."""
        return ModelSource.parse(self.source)

    @property
    def served_name(self) -> str:
        """The name that requests send as "model"."""
        return self.name or self.parsed_source.default_name


class GatewayAutoscalingSpec(ManifestModel):
    """GatewayAutoscalingSpec scales the gateway by its CPU utilization."""

    max_replicas: Replicas
    """Maximum number of replicas. It must not be below replicas, which is the minimum."""
    cpu_percent: Annotated[int, Field(ge=1, le=1000)] = 70
    """Target utilization of the requested CPU, in percent, averaged over all replicas."""


class EngineAutoscalingSpec(ManifestModel):
    """EngineAutoscalingSpec scales an engine group by its queue length."""

    max_replicas: Replicas
    """Maximum number of replicas. It must not be below replicas, which is the minimum."""
    queue_depth: Annotated[int, Field(ge=1, le=1000)] = 4
    """Target number of waiting requests per replica."""


class IngressSpec(ManifestModel):
    """IngressSpec exposes the gateway outside the cluster through an Ingress."""

    host: HostName
    """Host name of the gateway, like rag.example.com."""
    class_name: ForeignName | None = None
    """Ingress class. If unset, the cluster's default class applies."""
    tls_secret: ForeignName | None = None
    """Secret of type kubernetes.io/tls with the host's certificate. If unset, the Ingress serves
    plain HTTP."""


class HTTPRouteSpec(ManifestModel):
    """HTTPRouteSpec exposes the gateway outside the cluster through the Gateway API."""

    gateway: ForeignName
    """Name of the Gateway object that the route attaches to."""
    gateway_namespace: Namespace | None = None
    """Namespace of the Gateway object. If unset, the namespace of this object applies."""
    hostnames: Annotated[tuple[HostName, ...], ServerList(16, kind="set")] = ()
    """Host names that the route matches, and that the gateway allows. If empty, the route matches
    all host names of the Gateway object, and allowedHosts has to name those that clients use."""


class GatewayServiceSpec(ManifestModel):
    """GatewayServiceSpec exposes the gateway's port for questions outside the cluster through a
    Service of its own. The adminPort stays inside."""

    type: Literal["LoadBalancer", "NodePort"] = "LoadBalancer"
    """Type of the Service."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations of the Service, which controllers of load balancers read."""
    load_balancer_class: LabelKey | None = None
    """Class of the load balancer. If unset, the cluster's default applies. It is immutable."""
    load_balancer_source_ranges: Annotated[tuple[IpBlock, ...], ServerList(64, kind="set")] = ()
    """Addresses that may connect to the load balancer, like 10.0.0.0/8. If empty, all may."""
    external_traffic_policy: Literal["Cluster", "Local"] = "Cluster"
    """Local keeps the client's address, and sends requests to nodes with a gateway only."""
    node_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on every node. If unset, Kubernetes chooses one."""


class GatewayLimitsSpec(ManifestModel):
    """GatewayLimitsSpec sets the limits of each gateway replica. The gateway answers a request
    above a limit with 429 and Retry-After. Requests about its own state have no limit. A change
    needs no restart."""

    questions: Annotated[int, Field(ge=1, le=10_000)] = 128
    """Maximum number of questions at once, from their arrival to the end of their answers. It
    bounds the gateway's memory alone. It has no effect on how many requests the engines compute at
    once; gateway.slo bounds how long questions wait for them."""
    document_requests: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Maximum number of requests at once that need the retriever alone: those about documents and
    collections, and searches. Questions do not count."""
    first_token_timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 120
    """Maximum time from sending a prompt to an engine to the first token of the answer. It includes
    the time in the engine's queue. The gateway then answers with 503."""
    connections: Annotated[int, Field(ge=16, le=1_000_000)] = 4096
    """Maximum number of connections at once, on each of the two ports. A client's address gets at
    most half of them. The gateway answers one more
    with 503."""
    next_token_timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Maximum time from one token of an answer to the next. The gateway then ends the answer with
    an error."""


class ReorderingSpec(ManifestModel):
    """ReorderingSpec sets the order of questions that wait for an engine. The more of a prompt is
    cached, the earlier the engine begins with it."""

    window_milliseconds: Annotated[int, Field(ge=0, le=600_000)] = 0
    """How much later a question may be sent and still go first, if all of its prompt is cached and
    nothing of the other one. A larger value shortens the mean wait under load. A smaller one lets
    questions about new documents wait less. With 0, questions go in the order in which they were
    sent. Priorities of API keys come first in each case."""


class GatewaySloSpec(ManifestModel):
    """GatewaySloSpec sets how long answers may take. The gateway answers a question that is
    predicted to take longer with 429 and Retry-After, so that overload delays no other question."""

    first_token_milliseconds: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    """Maximum predicted time from the arrival of a question to the first token of its answer. It
    includes the search and the time in the engine's queue. An engine that has answered only a few
    questions refuses none. If unset, there is no limit."""
    next_token_milliseconds: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    """Maximum predicted time from one token of an answer to the next. An engine that would exceed
    it with one more answer gets no question. The gateway refuses a question if that holds for all
    engines. If unset, there is no limit."""


class KeyFileSecret(SecretKey):
    """KeyFileSecret selects one entry of a Secret that holds a file of API keys."""

    key: SecretEntry = "keys.toml"
    """Key in the Secret's data that holds the file."""


class GatewayAuthSpec(ManifestModel):
    """GatewayAuthSpec sets who may call the gateway."""

    enabled: bool = True
    """Whether requests need an API key. With false, every client that reaches the gateway may read
    and change all documents."""
    secret_ref: KeyFileSecret | None = None
    """Secret with a file of API keys, which `ragcache keys new` makes entries for. If unset, the
    operator creates a Secret with one admin key, which status.apiKeySecret names. `ragcache up`
    uses the file api-keys.toml in its data folder instead."""


class GatewayTlsSpec(ManifestModel):
    """GatewayTlsSpec names the certificate that the gateway shows to its clients."""

    secret_name: ForeignName
    """Secret of type kubernetes.io/tls with the certificate and its key, as cert-manager keeps it.
    A change takes effect without a restart. Pods wait until it exists. `ragcache up` reads tls.crt
    and tls.key in the folder gateway-tls in its data folder instead."""


class GatewayAuditSpec(ManifestModel):
    """GatewayAuditSpec sets where the gateway records who read and changed which documents."""

    claim: ForeignName | None = None
    """Volume claim of the namespace on which each gateway appends to a file of its own, named after
    its pod. Several gateways need one that several nodes may mount. If unset, the lines go to
    standard output of the gateway's container, where a log collector takes them. `ragcache up`
    writes the file audit/gateway.jsonl in its data folder instead."""
    max_size: ByteQuantity = "1Gi"
    """Maximum size of the files of one gateway, and also of those of all gateways together that
    have written nothing for seven days. Above it, the oldest file is deleted. It has no effect on
    standard output."""


class GatewaySpec(ManifestModel):
    """GatewaySpec sets the gateway, which serves the REST API."""

    port: Port = 8080
    """Port of the gateway's Service for questions, searches, models and health. ingress and
    httpRoute expose this port. `ragcache up` binds it on 127.0.0.1, and serves every path there."""
    admin_port: Port = 8090
    """Port of the gateway's Service for every path: documents, collections, backups, quality,
    metrics and the state of components, too. ingress and httpRoute do not expose it."""
    auth: GatewayAuthSpec | None = None
    """Who may call the gateway. If unset, requests need an API key in a cluster, and need none with
    `ragcache up`, which only this machine reaches."""
    oidc: Annotated[tuple[OidcIssuerSpec, ...], ServerList(8, kind="map")] = ()
    """Issuers of OpenID Connect. A caller may send a token of one of them in place of an API key.
    `ragcache up` then needs keys, too."""
    tls: GatewayTlsSpec | None = None
    """Serves HTTPS on port and adminPort, and no plain HTTP. If unset, both serve plain HTTP. It
    cannot be combined with ingress or httpRoute, whose controllers send plain HTTP."""
    audit: GatewayAuditSpec | None = None
    """Records writes, deletes, reads of documents, backups and refused requests in an audit log. If
    unset, there is none. {} writes it to standard output. While it cannot be written, the gateway
    answers changes of documents with 503."""
    replicas: Replicas = 1
    """Number of gateway replicas. With autoscaling, this is the minimum."""
    autoscaling: GatewayAutoscalingSpec | None = None
    """Scales the gateway between replicas and maxReplicas by CPU utilization. It needs a metrics
    API in the cluster. If unset, the gateway has a fixed number of replicas."""
    resources: ResourcesSpec = ResourcesSpec()
    """Resource requests and limits of each gateway pod. A gateway is one process and uses one
    core."""
    limits: GatewayLimitsSpec = GatewayLimitsSpec()
    """Limits of the requests that each replica answers."""
    slo: GatewaySloSpec | None = None
    """Limits on the latency of answers. If unset, questions wait in the engines' queues until
    limits.firstTokenTimeoutSeconds."""
    order: Literal["rank", "cached"] = "rank"
    """Order of documents in a prompt. rank: best first. cached: a prompt begins with documents
    whose KV is stored in this order, so that more KV is reused. Answers may differ, because models
    attend to positions differently. Requests can set it with ragcache.order."""
    max_displacement: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Most positions that a document may move from its rank with order cached. If unset, there is
    no limit."""
    reordering: ReorderingSpec = ReorderingSpec()
    """The order of questions that wait for an engine."""
    layout: Literal["system-first", "documents-first"] = "system-first"
    """What a prompt begins with. documents-first puts the system prompt after the documents, so
    that a date or a user in it does not prevent the reuse of their KV. Answers may differ. Requests
    can set it with ragcache.layout."""
    speculation: Literal["off", "auto"] = "off"
    """Whether an engine computes a question's prompt while its search runs, from the documents that
    the search has found so far. auto does it where it is expected to save more time than it wastes
    at the present load. Write "off" in quotes: YAML reads it as false."""
    rewrite: Literal["off", "rules", "model"] = "rules"
    """How the gateway makes the search query of a conversation whose request does not say it. With
    off, it searches for the user's last message. With rules, it adds nouns of earlier turns to a
    message that refers to them. With model, the served model writes the query, which takes as long
    as a short answer."""
    console: Literal["off", "on"] = "on"
    """Whether the gateway serves the console at /console of the admin port: a page to ask questions
    and to see what was reused. It has no data of its own and requests everything with the API key
    of its user. Write "off" in quotes: YAML reads it as false."""
    allowed_hosts: Annotated[tuple[HostPattern, ...], ServerList(32)] = ()
    """Further host names under which clients reach the gateway, like rag.example.com. *.example.com
    allows all names below example.com, and * allows all names. The gateway answers other names with
    403, so that no web site can have its own name resolve to the gateway (DNS rebinding). Always
    allowed are IP addresses, localhost, the names of the Service, and the host names of ingress and
    httpRoute. With *, any web site can read and change documents through a visitor's browser. The
    names of the Service are those of the domain cluster.local. In a cluster of another domain, add
    the full name, like docs-gateway.team.svc.example.org."""
    allowed_origins: Annotated[tuple[WebOrigin, ...], ServerList(32)] = ()
    """Origins of web pages that may send requests from a browser, like https://app.example.com, or
    * for all. The gateway answers pages of other origins with 403, and preflight requests of
    allowed ones as CORS requires. Programs that are not browsers send no origin and need no
    entry."""
    ingress: IngressSpec | None = None
    """Exposes the gateway through an Ingress. It cannot be combined with httpRoute."""
    http_route: HTTPRouteSpec | None = None
    """Exposes the gateway through an HTTPRoute. It cannot be combined with ingress."""
    service: GatewayServiceSpec | None = None
    """Exposes the gateway through a Service with the name NAME-gateway-external. Clients that use a
    host name need it in allowedHosts."""
    pod_template: PodTemplateSpec | None = None
    """Additions to the gateway's pods, which override those of spec.podTemplate."""


class GPUSpec(ManifestModel):
    """GPUSpec sets the GPU of each engine of a group."""

    resource: ExtendedResource = "nvidia.com/gpu"
    """Extended resource, like nvidia.com/mig-3g.40gb for a part of a GPU. Each engine takes
    tensorParallel of it."""
    memory_share: Annotated[float, Field(ge=0.1, le=0.98, allow_inf_nan=False)] = 0.9
    """Share of each GPU's memory that the engine takes for weights, activations and its paged KV
    cache. With kvMemory it has no effect."""
    shared_memory: ByteQuantity | None = None
    """Size of /dev/shm, through which vLLM's processes communicate. If unset, it is 1Gi, or 512Mi
    for each rank if that is more."""


class EngineSpec(ManifestModel):
    """EngineSpec sets one group of identical vLLM engines."""

    name: EngineName = "main"
    """Name of the engine group. The names of its Kubernetes objects contain it."""
    url: EngineUrl | None = None
    """URL of a server that RagCache does not run, like http://vllm.models.svc:8000 or
    https://llm.example.com. Any server of OpenAI's API will do that serves spec.model with its
    maxLength. A vLLM from version 0.32 on gets the token ids of prompts, and other servers get
    text. No server gets plans, so it stores and loads no KV. The gateway predicts what its prefix
    cache has, and corrects that by the cached tokens that it reports. Each address of an http host
    is one engine, and an https host is one. https needs a certificate of a public authority or of
    spec.trustedCA. All other fields of the group except name, keySecret and servedName must be left
    out."""
    key_secret: ApiKeySecret | None = None
    """API key of the server at url, which requests to it carry. A change takes effect without a
    restart. `ragcache up` reads the file engine-keys/NAME in its data folder instead, with the name
    of the group. If unset, requests carry no key."""
    served_name: ServedName | None = None
    """Name of the model at url. If unset, it is the name that requests to the gateway have."""
    model: ModelSpec | None = None
    """Model of this group. If unset, it is spec.model, which at least one group must serve. A
    request chooses a model by its name. All models answer from the same documents, whose chunks
    spec.model's tokenizer bounds. Groups with the same name of the model must have the same
    model."""
    role: Literal["both", "prefill", "decode"] = "both"
    """What the engines of the group do for a request. With both, one engine computes the prompt and
    generates the answer. An engine with prefill computes prompts, and one with decode loads their
    KV from the cache store and generates the answers. So long prompts do not delay answers in
    progress. An engine with decode also computes what takes less time than a handoff. If engines of
    one role are missing, those of another role do both."""
    replicas: Replicas = 1
    """Number of engine replicas. With autoscaling, this is the minimum."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that the engine computes on: the processor, or NVIDIA GPUs."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of ranks of each engine (tensor parallelism). Each rank has a part of the weights
    and of the KV heads. With device cuda each rank has a GPU of its own, all on one node. On a
    processor the ranks share the cores of resources.cpuLimit. It must divide the model's number of
    KV heads. Groups of the same model have the same number, because each rank stores its own
    heads."""
    gpu: GPUSpec | None = None
    """The GPUs of each engine, only with device cuda. If unset, they are nvidia.com/gpu."""
    kv_memory: ByteQuantity | None = None
    """Size of the engine's paged KV cache, rounded up to whole GiB for each rank. It is that of all
    ranks together. The engine loads other KV from the cache store. If unset, it is 2Gi on a
    processor, and what gpu.memoryShare leaves on a GPU."""
    host_tier: ByteQuantity | None = None
    """Size of the host memory tier of each replica, which holds the variants that it loads most
    often. If unset, the engine loads every variant from the cache store."""
    args: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], ServerList(32)] = ()
    """Further arguments of vLLM's server, each as one item: --flag or --flag=value. They can only
    be flags that load no code, read no files and work with the cache store."""
    unsafe_args: Annotated[tuple[UnsafeArgument, ...], ServerList(16)] = ()
    """Arguments of vLLM's server that RagCache does not check, each as one item: --flag or
    --flag=value. They can run code in the engine, read its files, publish prompts, or make stored
    KV wrong. Flags that the engine refuses or that RagCache sets are not allowed here either."""
    resources: ResourcesSpec = ResourcesSpec()
    """Resource requests and limits of each engine's container. By default they follow from the
    model's weights, kvMemory and hostTier."""
    pod_template: PodTemplateSpec | None = None
    """Additions to the pods of this group, such as the labels of nodes with much memory. They
    override those of spec.podTemplate."""
    autoscaling: EngineAutoscalingSpec | None = None
    """Scales the engines between replicas and maxReplicas by queue length. It needs a custom
    metrics API that serves vLLM's metrics. If unset, the group has a fixed number of replicas."""

    @property
    def gpu_or_default(self) -> GPUSpec:
        """The GPU of each engine, if it computes on one."""
        return self.gpu or GPUSpec()

    @property
    def rank_kv_gib(self) -> int | None:
        """Size of a rank's paged KV cache in GiB, rounded up. vLLM takes whole GiB on processors.

        None: it is what a GPU has left.
        """
        num_bytes = _DEFAULT_KV_GIB * _GIB
        if self.kv_memory is not None:
            num_bytes = parse_quantity(self.kv_memory)
        elif self.device == "cuda":
            return None
        return -(-num_bytes // (self.tensor_parallel * _GIB))

    @property
    def host_kv_bytes(self) -> int:
        """Size of the paged KV cache in host memory, in bytes."""
        gib = self.tensor_parallel * (self.rank_kv_gib or 0)
        return gib << 30 if self.device == "cpu" else 0

    @property
    def shared_memory_bytes(self) -> int:
        """Size of /dev/shm."""
        given = self.gpu_or_default.shared_memory if self.device == "cuda" else None
        if given is not None:
            return parse_quantity(given)
        return max(_GIB, self.tensor_parallel * RANK_SHARED_BYTES)

    @property
    def host_tier_bytes(self) -> int:
        """Size of the host memory tier in bytes; 0 if there is none."""
        return 0 if self.host_tier is None else parse_quantity(self.host_tier)


class ReplicationSpec(ManifestModel):
    """ReplicationSpec sets the replication of frequently read variants between shards."""

    enabled: bool = True
    """Whether a busy shard copies its most read variants to another shard, and deletes the copies
    when their read rate falls. It has no effect with one shard."""


KvCodec = Literal["native", "packed", "int8", "e4m3", "e5m2", "gse8"]
"""How the cache store may encode attention keys or values."""


class PrecisionGradeSpec(ManifestModel):
    """PrecisionGradeSpec sets the codecs of one group of variants. native stores numbers as
    computed. packed compresses bfloat16 to about three quarters of its size without loss. int8,
    e4m3, e5m2 and gse8 take about half of the bytes and lose precision."""

    share: Annotated[float, Field(ge=0.001, le=0.999, allow_inf_nan=False)] | None = None
    """Share of the variants that have this grade. The last grade has none: it gets the rest."""
    key: KvCodec = "native"
    """Codec of attention keys."""
    value: KvCodec = "native"
    """Codec of attention values."""


class PrecisionSpec(ManifestModel):
    """PrecisionSpec sets how the cache store encodes variants: the most read ones finest. Lossy
    codecs need reuse mode blend and a quality target. They are used after a report of "ragcache
    quality" that covers them has passed."""

    scheme: Literal["harag", "score"] = "harag"
    """What decides the grade of a variant. harag ranks variants by reads, and gives each grade its
    share (Algorithm 1 of the HA-RAG paper). score saves as many bytes as maxError allows: rarely
    read variants become coarse first."""
    grades: Annotated[tuple[PrecisionGradeSpec, ...], ServerList(4, min_items=1)] = (
        PrecisionGradeSpec(),
    )
    """The grades, for the most read variants first."""
    max_error: Annotated[float, Field(ge=0.0001, le=1, allow_inf_nan=False)] | None = None
    """For scheme score: bound of the error of the numbers that engines load, relative to these
    numbers and averaged over reads. Each shard measures the error of each grade on values of the
    model. The default is 0.02."""


class DiskKeySecret(SecretKey):
    """DiskKeySecret selects one entry of a Secret that holds keys of the disk tier."""

    key: SecretEntry = "keys"
    """Key in the Secret's data that holds the keys."""


class EncryptionSpec(ManifestModel):
    """EncryptionSpec sets the encryption of the values on the volumes of the cache store."""

    secret_ref: DiskKeySecret | None = None
    """Secret with one key a line, each of 32 bytes or more in hex or base64, like those of
    `openssl rand -hex 32`. The first one encrypts, and each one decrypts. A change takes effect
    without a restart. If unset, the operator creates a Secret with one key. `ragcache up` keeps a
    key in disk.key in its data folder instead."""


class CacheStoreSpec(ManifestModel):
    """CacheStoreSpec sets the cache store, which holds variants in a memory tier and a disk
    tier."""

    placement: Literal["separate", "colocated"] = "separate"
    """Where the shards run. separate: in pods of their own. colocated: one in each pod of the
    engines, which reads its own shard through shared memory and the others over the network. All
    shards are one pool, and an engine that goes takes its share of the variants along. It is
    immutable. `ragcache up` runs one shard, which shares memory with all engines, for both."""
    shards: Replicas = 1
    """Number of cache store pods. The variants are distributed over them. With placement colocated
    there are as many shards as engines."""
    memory: ByteQuantity = "1Gi"
    """Size of each shard's memory tier."""
    disk: StorageSpec = StorageSpec()
    """The volume of each shard's disk tier. Its size can grow, and its class is immutable."""
    encryption: EncryptionSpec | None = None
    """Encrypts the values of the disk tier (AES-256-GCM). {} does, with a key of the operator. If
    unset, they are plain. A shard drops the values on its disk that it cannot decrypt, and plain
    ones if it encrypts."""
    policy: PolicyName = "score"
    """Eviction policy of both tiers. score evicts the variant with the fewest decayed saved seconds
    per byte. lru evicts the least recently used variant. pgdsf and cachecraft are the policies of
    the RAGCache and Cache-Craft papers."""
    admission: Literal["always", "secondTouch", "score"] | None = None
    """Admission policy of the disk tier. always writes every variant in the background. secondTouch
    writes a variant at its first read. score writes a variant whose score is above that of the
    variants it displaces; it requires policy score. If unset, it is score for reuse mode blend with
    policy score, and always otherwise. A variant that is not on disk is lost when the memory tier
    evicts it or the shard restarts."""
    precision: PrecisionSpec = PrecisionSpec()
    """Codecs of attention keys and values, by how often variants are read."""
    replication: ReplicationSpec = ReplicationSpec()
    """Replication of frequently read variants between shards."""
    resources: ResourcesSpec = ResourcesSpec()
    """Resource requests and limits of each shard's container. By default they follow from memory
    and disk."""
    pod_template: PodTemplateSpec | None = None
    """Additions to the pods of the shards, which override those of spec.podTemplate. With placement
    colocated the pods have those of their engines."""

    @property
    def memory_bytes(self) -> int:
        """Size of one shard's memory tier in bytes."""
        return parse_quantity(self.memory)


class ReuseSpec(ManifestModel):
    """ReuseSpec sets how engines reuse stored KV. A request can override mode."""

    mode: Literal["exact", "blend"] = "exact"
    """Which KV engines load. exact loads only KV that equals what the engine would compute. blend
    also loads KV that was computed after another prefix, and recomputes a share of its tokens.
    Answers of blend may differ from those of a full computation."""
    max_recompute_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.2
    """Maximum share of loaded tokens that blend recomputes. It counts the tokens whose KV was
    computed after another prefix. A larger share takes longer and brings answers closer to a full
    computation. It also limits requests that ask for blend."""
    quality: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Minimum average quality of blended answers, like 0.95, as ROUGE-L F1 against full
    computations. Nothing is blended until a measurement of this model passes: either a report of
    "ragcache quality", or the gateway's own trials. When idle, it replays recent questions in full
    and with several recompute shares. After eight replays it uses the smallest share that reaches
    this quality, up to maxRecomputeShare. If no share does, it uses exact reuse. Without this
    field, blends are allowed, and the condition BlendVerified and a header of each blended answer
    say whether a report has passed."""
    precompute: bool = False
    """Whether engines compute KV ahead of requests when the gateway is idle, at the lowest
    priority. With blend they compute the chunks of each new document, the most central ones first,
    each after other chunks. In both modes they compute
    chunks that requests recomputed repeatedly and the store lacks. With exact, these are chunks of
    the document at the start of the prompt."""


class RagCacheSpec(ManifestModel):
    """RagCacheSpec sets the components of a platform."""

    model: ModelSpec = ModelSpec()
    """The model that the engines serve."""
    gateway: GatewaySpec = GatewaySpec()
    """The gateway, which serves an OpenAI-compatible REST API."""
    retriever: RetrieverSpec = RetrieverSpec()
    """The retriever, which stores documents and searches them."""
    engines: Annotated[tuple[EngineSpec, ...], ServerList(16, min_items=1, kind="map")] = (
        EngineSpec(),
    )
    """Groups of vLLM engines. Each group has its own size and number of replicas, or is a server
    that RagCache does not run."""
    cache_store: CacheStoreSpec = CacheStoreSpec()
    """The cache store, which holds variants in a memory tier and a disk tier."""
    reuse: ReuseSpec = ReuseSpec()
    """How engines reuse stored KV."""
    sync_jobs: SyncJobsSpec = SyncJobsSpec()
    """The Jobs that sync the RagCollections of this RagCache."""
    pod_template: PodTemplateSpec = PodTemplateSpec()
    """Additions to the pods of all components and Jobs: labels, scheduling, security. Each
    component can override it: labels and annotations are merged, and every other field that a
    component gives, even an empty one, replaces the one here."""
    env: Annotated[tuple[EnvVarSpec, ...], ServerList(64, kind="map")] = ()
    """Environment variables of the pods of all components and Jobs, like HF_ENDPOINT for a mirror
    of the hub. They override variables that RagCache sets, and RagCache does not check them."""
    trusted_ca: Annotated[TrustedCASpec | None, Field(alias="trustedCA")] = None
    """Certificate authorities that all pods and Jobs trust, in place of those of the images. The
    bundle must also have the public ones that they need."""
    proxy: ProxySpec | None = None
    """Proxy of all pods and Jobs for hosts outside the cluster."""
    data_policy: Literal["Retain", "Delete"] = "Retain"
    """Whether deletion of this object keeps the volumes with documents and variants. With Retain
    the claims stay, and a new object of the same name uses them. Delete deletes them."""
    tls: TlsSpec = TlsSpec()
    """Encryption of the connections between the components."""
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    """Network connections that pods may open."""
    telemetry: TelemetrySpec = TelemetrySpec()
    """Where components send metrics and traces."""

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """Every model once, spec.model first."""
        found = {self.model.served_name: self.model}
        for engine in self.engines:
            found.setdefault(self.model_of(engine).served_name, self.model_of(engine))
        return tuple(found.values())

    def ranks_of(self, model: ModelSpec) -> int:
        """Return the number of ranks of the engines that serve a model."""
        served = (one for one in self.own_engines if self.model_of(one) == model)
        return next((one.tensor_parallel for one in served), 1)

    def model_of(self, engine: EngineSpec) -> ModelSpec:
        """Return the model of a group of engines."""
        return engine.model or self.model

    @property
    def own_engines(self) -> tuple[EngineSpec, ...]:
        """The groups of engines that RagCache runs: those without a URL."""
        return tuple(engine for engine in self.engines if engine.url is None)


class RagCache(ManifestModel):
    """RagCache is a platform that answers questions about documents and reuses their KV cache. It
    consists of a gateway, a retriever, engines and a cache store."""

    api_version: Literal["ragcache.dev/v1alpha1"]
    kind: Literal["RagCache"]
    metadata: ObjectMeta
    spec: RagCacheSpec = RagCacheSpec()
    """Desired state of the platform. Every field has a default, so an empty spec is valid."""
