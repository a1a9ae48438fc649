"""A file that pods read again when it changes, so that a change restarts none of them."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache_operator.builders.labels import labels, object_name
from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.builders.pods.pod import Mount
from ragcache_operator.spec import RagCache


@dataclass(frozen=True, slots=True)
class WatchedConfig:
    """A ConfigMap with one file, and the folder in which containers find it.

    Args:
        volume: Name of the volume in a pod.
        suffix: Name of the ConfigMap within the RagCache.
        folder: Path of the folder in a container.
        file: Name of the file in it.
    """

    volume: str
    suffix: str
    folder: str
    file: str

    def config_map(self, cache: RagCache, component: str, content: str) -> Object:
        """Return the ConfigMap, which belongs to a component."""
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": object_name(cache, self.suffix),
                "namespace": cache.metadata.namespace,
                "labels": labels(cache.metadata.name, component),
            },
            "data": {self.file: content},
        }

    def mount(self, cache: RagCache) -> Mount:
        """Return the mount of the folder. Kubernetes does not update a file mounted alone."""
        volume = {"configMap": {"name": object_name(cache, self.suffix)}}
        return Mount(self.volume, self.folder, volume, read_only=True)
