"""Volume claims of a StatefulSet: what outlives its pods."""

from __future__ import annotations

from collections.abc import Mapping

from ragcache_operator.builders.canonical import canonical
from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.spec import StorageSpec

DATA_VOLUME = "data"


def claim_template(storage: StorageSpec, labels: Mapping[str, str]) -> Object:
    """Each pod's own volume.

    labels: by them deletion finds the claims, which have no owner so that they outlive the RagCache
    where its policy says so.
    """
    spec: Object = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": canonical(storage.size)}},
    }
    if storage.class_name is not None:
        spec["storageClassName"] = storage.class_name
    return {"metadata": {"name": DATA_VOLUME, "labels": dict(labels)}, "spec": spec}
