"""Owner references and content hashes of Kubernetes objects."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ragcache_operator.spec import API_VERSION, GROUP, KIND, RagCache

Object = dict[str, Any]
"""A Kubernetes object, or a part of one, as a JSON value."""

SPEC_HASH = f"{GROUP}/spec-hash"


def with_owner(child: Object, cache: RagCache, owner_uid: str) -> Object:
    """Return a child that Kubernetes deletes together with its RagCache.

    Args:
        owner_uid: Uid of the live RagCache. Empty if there is none.
    """
    if not owner_uid:
        return child
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": cache.metadata.name,
        "uid": owner_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {**child, "metadata": {**child["metadata"], "ownerReferences": [owner]}}


def with_spec_hash(child: Object) -> Object:
    """Return a child with an annotation that contains the hash of its content.

    A comparison of fields does not detect fields that are no longer desired: the server and other
    controllers add fields, so a live object always has more fields than the applied one.
    """
    content = json.dumps(child, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    metadata = child["metadata"]
    annotations = {**metadata.get("annotations", {}), SPEC_HASH: digest}
    return {**child, "metadata": {**metadata, "annotations": annotations}}
