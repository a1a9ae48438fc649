"""Where things are: what a builder cannot know from the spec alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from ragcache_core.errors import InvalidInput
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.pods.environment import EnvValue, FromField
from ragcache_operator.spec import ModelSource, RagCache

PORT_NUMBERS: Final = {
    "http": 8000,
    "grpc": 50051,
    "data": 50052,
    "health": 8081,
    "events": 5557,
    "replay": 5558,
}
"""A part is alone in its pod, so a port's name fixes its number."""

MEMBERS_FOLDER: Final = "/etc/ragcache/members"
MEMBERS_FILE: Final = "cachestore.json"
SIGNING_KEY_FOLDER: Final = "/etc/ragcache/signing-key"
SIGNING_KEY_FILE: Final = "keys"
_POD_NAME: Final = "POD_NAME"
MODEL_FOLDER: Final = "/model"
"""Where a pod mounts the volume that its model comes from."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One port of one part.

    part: its name within the RagCache (``engine-main``). port: the port's name (``http``).
    """

    workload: str
    port: str


class Site(Protocol):
    """A cluster, or this machine."""

    @property
    def capabilities(self) -> Capabilities:
        """What the API server that gets the objects can do."""
        ...

    @property
    def owner(self) -> str:
        """Uid of the live RagCache; empty where there is none."""
        ...

    @property
    def operator_namespace(self) -> str | None:
        """Where the operator's pods are; None where that is not known."""
        ...

    def bind_address(self, endpoint: Endpoint) -> Address:
        """Where the part itself binds."""
        ...

    def address_of(self, endpoint: Endpoint) -> Address:
        """Where the other parts find it."""
        ...

    def zmq_endpoint(self, endpoint: Endpoint) -> str:
        """ZeroMQ endpoint that the part binds; empty where it had better not."""
        ...

    def cache_store_members(self) -> str:
        """Where the cache store's members are, as RAGCACHE_CACHESTORE says it."""
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
        """Path of a Unix socket over which the cache store and its clients come to share memory;
        empty where they see no folder in common."""
        ...

    def signing_key_file(self) -> str:
        """Path of the file with the keys that plans are sealed with."""
        ...

    def data_dir(self, workload: str) -> str:
        """Folder of the part's volume, as the part sees it."""
        ...

    def model(self, source: ModelSource) -> str:
        """The model as the parts name it: a folder they see, or a Hugging Face name.

        Raises InvalidInput for a source that cannot be had here.
        """
        ...

    def image(self, component: str) -> str:
        """Image that holds the component."""
        ...

    def env(self) -> Mapping[str, str]:
        """What every container's environment needs here."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterSite:
    """Pods behind Services. images: registry and path before an image's name; tag: after it."""

    name: str
    namespace: str
    images: str
    tag: str
    gateway_port: int
    capabilities: Capabilities
    owner: str
    operator_namespace: str | None

    @classmethod
    def of(
        cls,
        cache: RagCache,
        *,
        images: str = "ragcache",
        tag: str,
        capabilities: Capabilities | None = None,
        owner: str = "",
        operator_namespace: str | None = None,
    ) -> ClusterSite:
        """The cluster that cache is applied to; without capabilities a current one."""
        meta = cache.metadata
        return cls(
            name=meta.name,
            namespace=meta.namespace,
            images=images,
            tag=tag,
            gateway_port=cache.spec.gateway.port,
            capabilities=capabilities or Capabilities.latest(),
            owner=owner,
            operator_namespace=operator_namespace,
        )

    @property
    def gateway_url(self) -> str:
        """Base URL of the REST interface, for whoever is in the cluster."""
        return f"http://{self.address_of(Endpoint('gateway', 'http'))}"

    def bind_address(self, endpoint: Endpoint) -> Address:
        """Every interface."""
        return Address("0.0.0.0", PORT_NUMBERS[endpoint.port])

    def address_of(self, endpoint: Endpoint) -> Address:
        """The part's Service, whose ports are the pod's but for the gateway's own choice."""
        port = self.gateway_port if endpoint.workload == "gateway" else PORT_NUMBERS[endpoint.port]
        return Address(f"{self.name}-{endpoint.workload}.{self.namespace}.svc", port)

    def zmq_endpoint(self, endpoint: Endpoint) -> str:
        """Every interface."""
        return f"tcp://*:{PORT_NUMBERS[endpoint.port]}"

    def cache_store_members(self) -> str:
        """A mounted file, which changes with the number of shards while pods run on."""
        return f"file:{MEMBERS_FOLDER}/{MEMBERS_FILE}"

    def shard_address(self, shards: Endpoint) -> str:
        """Return the pod's name in front of the Service's, as in the members file."""
        return f"$({_POD_NAME}).{self.address_of(shards)}"

    def pod_identity(self) -> Mapping[str, EnvValue]:
        """Return the pod's name."""
        return {_POD_NAME: FromField("metadata.name")}

    def data_socket(self) -> str:
        """None: every part is in a pod of its own."""
        return ""

    def signing_key_file(self) -> str:
        """A mounted file, which changes with its Secret while pods run on."""
        return f"{SIGNING_KEY_FOLDER}/{SIGNING_KEY_FILE}"

    def data_dir(self, workload: str) -> str:
        """The volume's mount."""
        return "/data"

    def model(self, source: ModelSource) -> str:
        """A folder of the image or of a mounted volume, or the hub's name."""
        match source.kind:
            case "bundled":
                return f"/models/{source.value}"
            case "hf":
                return source.value
            case "pvc":
                return "/".join(filter(None, (MODEL_FOLDER, source.folder)))
            case "image" if self.capabilities.image_volumes:
                return MODEL_FOLDER
            case "image":
                raise InvalidInput(
                    "spec.model.source",
                    f"Kubernetes 1.{self.capabilities.minor} does not let a pod mount an image",
                    "use pvc:CLAIM/FOLDER or hf:ORGANISATION/NAME, or Kubernetes 1.35 or newer",
                )
        raise InvalidInput(
            "spec.model.source",
            f"path:{source.value} is a folder of this machine, which pods do not see",
            "use pvc:CLAIM/FOLDER, image:REFERENCE, hf:ORGANISATION/NAME or bundled:tinyrag",
        )

    def image(self, component: str) -> str:
        """One image per component."""
        return f"{self.images}/{component}:{self.tag}"

    def env(self) -> Mapping[str, str]:
        """The root file system is read-only; what libraries write goes to the scratch volume."""
        return {"HOME": "/tmp", "HF_HOME": "/tmp/huggingface"}
