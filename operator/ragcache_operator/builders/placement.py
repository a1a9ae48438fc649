"""Addresses, paths and images of a platform, which depend on where it runs.

Builders take a PlatformPlacement: ``ClusterPlacement`` is here, and the CLI has ``LocalPlacement``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from ragcache_core.errors import InvalidInput
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.certificates import IssuedCertificate
from ragcache_operator.builders.environment import EnvValue, FromField
from ragcache_operator.spec.ragcache import ModelSource, RagCache
from ragcache_operator.spec.retriever import EmbedderSpec, RerankerSpec

PORT_NUMBERS: Final = {
    "http": 8000,
    "admin": 8001,
    "grpc": 50051,
    "data": 50052,
    "store": 50053,
    "health": 8081,
    "metrics": 9464,
}
"""Port numbers by name. A pod has each name once: a shard beside an engine, which has the port grpc
itself, has store instead."""

MEMBERS_FOLDER: Final = "/etc/ragcache/members"
MEMBERS_FILE: Final = "cachestore.json"
SIGNING_KEY_FOLDER: Final = "/etc/ragcache/signing-key"
SIGNING_KEY_FILE: Final = "keys"
TLS_FOLDER: Final = "/etc/ragcache/tls"
GATEWAY_TLS_FOLDER: Final = "/etc/ragcache/gateway-tls"
STORE_KEY_FOLDER: Final = "/etc/ragcache/store-key"
STORE_KEY_FILE: Final = "store.key"
DISK_KEY_FOLDER: Final = "/etc/ragcache/disk-key"
DISK_KEY_FILE: Final = "keys"
API_KEYS_FOLDER: Final = "/etc/ragcache/api-keys"
API_KEYS_FILE: Final = "keys.toml"
AUDIT_FOLDER: Final = "/var/log/ragcache"
ENGINE_KEYS_FOLDER: Final = "/etc/ragcache/engine-keys"
LIMITS_FOLDER: Final = "/etc/ragcache/limits"
LIMITS_FILE: Final = "limits.json"
SOCKET_FOLDER: Final = "/run/ragcache"
"""Folder that an engine and the shard in its pod share."""
_POD_NAME: Final = "POD_NAME"
MODEL_FOLDER: Final = "/model"
EMBEDDER_FOLDER: Final = "/embedder"
CROSS_ENCODER_FOLDER: Final = "/cross-encoder"
"""Mount paths of the volumes with models."""
MODEL_CACHE_FOLDER: Final = "/model-cache"


def model_folder(number: int) -> str:
    """Return the mount path of a model, by its number in a pod that reads several."""
    return f"{MODEL_FOLDER}-{number}" if number else MODEL_FOLDER


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One port of one workload.

    Args:
        workload: Name of the workload within the RagCache, like ``engine-main``.
        port: Name of the port, like ``http``.
    """

    workload: str
    port: str


class PlatformPlacement(Protocol):
    """Where a platform runs: a cluster, or the local machine."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the API server."""
        ...

    @property
    def owner(self) -> str:
        """Uid of the live RagCache. Empty outside a cluster."""
        ...

    @property
    def operator_namespace(self) -> str | None:
        """Namespace of the operator's pods. None if unknown."""
        ...

    @property
    def source_networks(self) -> tuple[str, ...]:
        """Networks that are not public, and that sources of collections may have."""
        ...

    @property
    def issuer_networks(self) -> tuple[str, ...]:
        """Networks that are not public, and that issuers of tokens may have."""
        ...

    @property
    def is_cluster(self) -> bool:
        """Whether other machines reach the platform, so that it needs keys and a second port."""
        ...

    def bind_address(self, endpoint: Endpoint) -> Address:
        """Return the address that the workload binds."""
        ...

    def address_of(self, endpoint: Endpoint) -> Address:
        """Return the address under which other components reach it."""
        ...

    def host_names(self, endpoint: Endpoint) -> tuple[str, ...]:
        """Return the names under which clients reach it, beside IP addresses and localhost."""
        ...

    def cache_store_members(self) -> str:
        """Return the value of RAGCACHE_CACHESTORE: the members of the cache store."""
        ...

    def shard_address(self, shards: Endpoint) -> str:
        """Return the address of a shard among the members, for its own pod.

        Args:
            shards: The headless Service of the shards. The address may name variables of
                ``pod_identity``.
        """
        ...

    def pod_identity(self) -> Mapping[str, EnvValue]:
        """Return variables that name the pod, for use in other variables."""
        ...

    def data_socket(self) -> str:
        """Return the path of the Unix socket for shared memory with the cache store.

        Empty if the cache store and its clients share no folder.
        """
        ...

    def signing_key_file(self) -> str:
        """Return the path of the file with the signing keys of plans."""
        ...

    def tls_dir(self) -> str:
        """Return the path of the folder with the certificate of the parts."""
        ...

    def gateway_tls_dir(self) -> str:
        """Return the path of the folder with the certificate that clients of the gateway see."""
        ...

    @property
    def certificate(self) -> IssuedCertificate | None:
        """The certificate of the parts. None without an operator, and outside a cluster."""
        ...

    def store_key_file(self) -> str:
        """Return the path of the file with the key that names stored values."""
        ...

    def disk_key_file(self) -> str:
        """Return the path of the file with the keys of the values on disk."""
        ...

    def api_keys_file(self) -> str:
        """Return the path of the file with API keys."""
        ...

    def audit_log(self, *, has_claim: bool) -> str:
        """Return where the gateway's audit log goes, as its setting has it.

        Args:
            has_claim: Whether the spec names a volume claim for it.
        """
        ...

    def engine_key_file(self, group: str) -> str:
        """Return the path of the file with the API key of a server that serves as an engine."""
        ...

    def builtin_keys(self) -> str | None:
        """Return the hashes of the platform's own API keys, as the gateway's setting has them."""
        ...

    def data_dir(self, workload: str) -> str:
        """Return the path of the workload's volume inside its container."""
        ...

    def embedder(self, embedder: EmbedderSpec) -> str:
        """Return the embedder as the retriever's setting names it.

        Raises:
            InvalidInput: The retriever cannot read it here.
        """
        ...

    def reranker_model(self, reranker: RerankerSpec) -> str | None:
        """Return the model of the reranker as the retriever's setting names it, if it has one.

        Raises:
            InvalidInput: The retriever cannot read it here.
        """
        ...

    def model(self, source: ModelSource, number: int = 0) -> str:
        """Return the model as a folder inside the containers, or as a Hugging Face name.

        Args:
            number: Number of the model in a pod that reads several.

        Raises:
            InvalidInput: The source is not available here.
        """
        ...

    def image(self, component: str) -> str:
        """Return the image of a component."""
        ...

    def env(self) -> Mapping[str, str]:
        """Return the environment that every container needs here."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterPlacement:
    """A cluster, where every workload runs in pods behind a Service.

    Args:
        images: Registry and path before the name of an image.
        tag: Tag of the images.
        image_digests: Digest by component, in place of the tag.
        component_keys: Hashes of the operator's own API keys; None without an operator.
        certificate: Of the parts; None without an operator.
    """

    cache: RagCache
    tag: str
    images: str = "ragcache"
    capabilities: Capabilities = field(default_factory=Capabilities.latest)
    owner: str = ""
    operator_namespace: str | None = None
    component_keys: str | None = None
    source_networks: tuple[str, ...] = ()
    issuer_networks: tuple[str, ...] = ()
    image_digests: Mapping[str, str] = field(default_factory=dict)
    certificate: IssuedCertificate | None = None

    @property
    def gateway_url(self) -> str:
        """Base URL of the gateway inside the cluster, for questions."""
        return f"{self._gateway_scheme}://{self.address_of(Endpoint('gateway', 'http'))}"

    @property
    def admin_url(self) -> str:
        """Base URL of the gateway inside the cluster, for every path."""
        return f"{self._gateway_scheme}://{self.address_of(Endpoint('gateway', 'admin'))}"

    @property
    def _gateway_scheme(self) -> str:
        return "http" if self.cache.spec.gateway.tls is None else "https"

    @property
    def is_cluster(self) -> bool:
        """Return True."""
        return True

    def bind_address(self, endpoint: Endpoint) -> Address:
        """Return the port on every network interface."""
        return Address("0.0.0.0", PORT_NUMBERS[endpoint.port])

    def address_of(self, endpoint: Endpoint) -> Address:
        """Return the address of the Service. Only the gateway's Service has ports of its own."""
        port, gateway = PORT_NUMBERS[endpoint.port], self.cache.spec.gateway
        if endpoint.workload == "gateway":
            port = gateway.admin_port if endpoint.port == "admin" else gateway.port
        *_, host, _ = self.host_names(endpoint)
        return Address(host, port)

    def host_names(self, endpoint: Endpoint) -> tuple[str, ...]:
        """Return the names of the Service, with the default domain of a cluster."""
        meta = self.cache.metadata
        service = f"{meta.name}-{endpoint.workload}"
        host = f"{service}.{meta.namespace}.svc"
        return (service, f"{service}.{meta.namespace}", host, f"{host}.cluster.local")

    def cache_store_members(self) -> str:
        """Return a mounted file, so that pods follow a change of shards without a restart."""
        return f"file:{MEMBERS_FOLDER}/{MEMBERS_FILE}"

    def shard_address(self, shards: Endpoint) -> str:
        """Return the pod's name in front of the Service's, as in the members file."""
        return f"$({_POD_NAME}).{self.address_of(shards)}"

    def pod_identity(self) -> Mapping[str, EnvValue]:
        """Return the pod's name."""
        return {_POD_NAME: FromField("metadata.name")}

    def data_socket(self) -> str:
        """Return a socket for the engine in the shard's own pod.

        It has the pod's name: clients in other pods learn the path, too, and have no such file.
        """
        is_colocated = self.cache.spec.cache_store.placement == "colocated"
        return f"{SOCKET_FOLDER}/$({_POD_NAME}).sock" if is_colocated else ""

    def signing_key_file(self) -> str:
        """Return a mounted file, so that pods follow a key rotation without a restart."""
        return f"{SIGNING_KEY_FOLDER}/{SIGNING_KEY_FILE}"

    def tls_dir(self) -> str:
        """Return a mounted folder, so that pods follow a new certificate without a restart."""
        return TLS_FOLDER

    def gateway_tls_dir(self) -> str:
        """Return a mounted folder, so that pods follow a new certificate without a restart."""
        return GATEWAY_TLS_FOLDER

    def store_key_file(self) -> str:
        """Return a mounted file, which pods read at their start."""
        return f"{STORE_KEY_FOLDER}/{STORE_KEY_FILE}"

    def disk_key_file(self) -> str:
        """Return a mounted file, so that pods follow a key rotation without a restart."""
        return f"{DISK_KEY_FOLDER}/{DISK_KEY_FILE}"

    def api_keys_file(self) -> str:
        """Return a mounted file, so that pods follow changes of keys without a restart."""
        return f"{API_KEYS_FOLDER}/{API_KEYS_FILE}"

    def audit_log(self, *, has_claim: bool) -> str:
        """Return a file of the claim that is named after the pod, or standard output."""
        return f"{AUDIT_FOLDER}/$({_POD_NAME}).jsonl" if has_claim else "stdout"

    def engine_key_file(self, group: str) -> str:
        """Return a mounted file, so that pods follow a change of the key without a restart."""
        return f"{ENGINE_KEYS_FOLDER}/{group}"

    def builtin_keys(self) -> str | None:
        """Return the hashes of the operator's own keys."""
        return self.component_keys

    def data_dir(self, workload: str) -> str:
        """Return the mount path of the volume."""
        return "/data"

    def embedder(self, embedder: EmbedderSpec) -> str:
        """Return a folder of a mounted volume, or the source as it is."""
        if embedder.local_folder:
            raise InvalidInput(
                "spec.retriever.embedder.source",
                f"{embedder.source} is a local folder, which pods cannot read",
                "use pvc:CLAIM/FOLDER or hf:ORGANISATION/NAME",
            )
        if embedder.claim:
            return "/".join(filter(None, (f"path:{EMBEDDER_FOLDER}", embedder.claim_folder)))
        return embedder.source

    def reranker_model(self, reranker: RerankerSpec) -> str | None:
        """Return a folder of a mounted volume, or the name as it is."""
        if reranker.local_folder:
            raise InvalidInput(
                "spec.retriever.reranker.model",
                f"{reranker.model} is a local folder, which pods cannot read",
                "use pvc:CLAIM/FOLDER or the name of a model of the hub",
            )
        if reranker.claim:
            return "/".join(filter(None, (CROSS_ENCODER_FOLDER, reranker.claim_folder)))
        return reranker.model

    def model(self, source: ModelSource, number: int = 0) -> str:
        """Return a folder of the image or of a mounted volume, or a name of the hub."""
        match source.kind:
            case "bundled":
                return f"/models/{source.value}"
            case "hf":
                return source.value
            case "pvc":
                return "/".join(filter(None, (model_folder(number), source.folder)))
            case "image" if self.capabilities.image_volumes:
                return model_folder(number)
            case "image":
                raise InvalidInput(
                    "spec.model.source",
                    f"Kubernetes 1.{self.capabilities.minor} cannot mount an image as a volume",
                    "use pvc:CLAIM/FOLDER or hf:ORGANISATION/NAME, or Kubernetes 1.35 or newer",
                )
        raise InvalidInput(
            "spec.model.source",
            f"path:{source.value} is a local folder, which pods cannot read",
            "use pvc:CLAIM/FOLDER, image:REFERENCE, hf:ORGANISATION/NAME or bundled:smollm2",
        )

    def image(self, component: str) -> str:
        """Return the image of a component, by its digest if there is one."""
        digest = self.image_digests.get(component)
        return f"{self.images}/{component}" + (f"@{digest}" if digest else f":{self.tag}")

    def env(self) -> Mapping[str, str]:
        """Return home folders on the scratch volume, because the root file system is read-only.

        torch asks for the user's name, and a user that the cluster chose has none in the image.
        """
        return {"HOME": "/tmp", "HF_HOME": "/tmp/huggingface", "USER": "ragcache"}
