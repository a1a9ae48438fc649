"""Kubernetes objects as values: what an object is, who owns it, and the hash of what it says."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ragcache_operator.spec import API_VERSION, GROUP, KIND, RagCache

Object = dict[str, Any]
"""A Kubernetes object, or a piece of one, as JSON has it."""

SPEC_HASH = f"{GROUP}/spec-hash"


def with_owner(child: Object, cache: RagCache, owner_uid: str) -> Object:
    """Child, deleted with the cache. owner_uid: of the live object; empty when there is none."""
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
    """Child with the hash of its own content, so that a change is seen without comparing fields.

    Comparing alone would miss what is no longer asked for: a server fills in defaults and others
    add to an object, so that what is there is always more than what was sent.
    """
    content = json.dumps(child, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    metadata = child["metadata"]
    annotations = {**metadata.get("annotations", {}), SPEC_HASH: digest}
    return {**child, "metadata": {**metadata, "annotations": annotations}}
