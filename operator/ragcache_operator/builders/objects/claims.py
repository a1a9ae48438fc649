"""Volume claims of a StatefulSet."""

from __future__ import annotations

from collections.abc import Mapping

from ragcache_operator.builders.canonical import canonical
from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.spec import StorageSpec

DATA_VOLUME = "data"


def claim_template(storage: StorageSpec, labels: Mapping[str, str]) -> Object:
    """Return the claim template for the volume of each pod.

    The claims have no owner, because data policy Retain keeps them after the RagCache is deleted.

    Args:
        labels: Labels of the claims. A deletion finds the claims with these labels.
    """
    spec: Object = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": canonical(storage.size)}},
    }
    if storage.class_name is not None:
        spec["storageClassName"] = storage.class_name
    return {"metadata": {"name": DATA_VOLUME, "labels": dict(labels)}, "spec": spec}
