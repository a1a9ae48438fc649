"""Where things are: what a builder cannot know from the spec alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ragcache_core.errors import InvalidInput
from ragcache_operator.spec import ModelSource, RagCache

GRPC_PORT = 50051
HTTP_PORT = 8000


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Place:
    """One port of one part.

    part: its name within the RagCache (``engine-main``). port: the port's name (``http``).
    """

    part: str
    port: str


class Site(Protocol):
    """A cluster, or this machine."""

    def listen(self, place: Place) -> Address:
        """Where the part itself binds."""
        ...

    def reach(self, place: Place) -> Address:
        """Where the other parts find it."""
        ...

    def data_dir(self, part: str) -> str:
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

    @classmethod
    def of(cls, cache: RagCache, *, images: str = "ragcache", tag: str) -> ClusterSite:
        """The cluster that cache is applied to."""
        meta = cache.metadata
        return cls(meta.name, meta.namespace, images, tag, cache.spec.gateway.port)

    def listen(self, place: Place) -> Address:
        """Every interface; a part is alone in its pod, so a port's name fixes its number."""
        return Address("0.0.0.0", HTTP_PORT if place.port == "http" else GRPC_PORT)

    def reach(self, place: Place) -> Address:
        """The part's Service, whose ports are the pod's but for the gateway's own choice."""
        port = self.gateway_port if place.part == "gateway" else self.listen(place).port
        return Address(f"{self.name}-{place.part}.{self.namespace}.svc", port)

    def data_dir(self, part: str) -> str:
        """The volume's mount."""
        return "/data"

    def model(self, source: ModelSource) -> str:
        """A folder of the image, or the hub's name."""
        match source.kind:
            case "bundled":
                return f"/models/{source.value}"
            case "hf":
                return source.value
        raise InvalidInput(
            "spec.model.source",
            f"path:{source.value} is a folder of this machine, which pods do not see",
            "use hf:ORGANISATION/NAME or bundled:tinyrag in a cluster",
        )

    def image(self, component: str) -> str:
        """One image per component."""
        return f"{self.images}/{component}:{self.tag}"

    def env(self) -> Mapping[str, str]:
        """The root file system is read-only; what libraries write goes to the scratch volume."""
        return {"HOME": "/tmp", "HF_HOME": "/tmp/huggingface"}
