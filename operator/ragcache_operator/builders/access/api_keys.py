"""The Secrets with API keys, and the mount of the gateway's key file.

The operator creates Secrets and reads none. Users change the key file in their Secret, and gateways
read it again.
"""

from __future__ import annotations

import hashlib
from typing import Final

from ragcache_core.access.caller import Caller, Scope
from ragcache_core.access.key_file import entry_text, key_of
from ragcache_operator.builders.access.component_keys import SYNC, ComponentKeys
from ragcache_operator.builders.labels import labels, object_name
from ragcache_operator.builders.objects.ownership import Object, with_owner
from ragcache_operator.builders.pods.pod import Mount
from ragcache_operator.builders.site import API_KEYS_FILE, API_KEYS_FOLDER, Site
from ragcache_operator.spec import RagCache

ADMIN_KEY: Final = "admin-key"
"""Entry of the generated Secret with the key itself, for the person who installs a RagCache."""

_SUFFIX: Final = "api-keys"
_SYNC_SUFFIX: Final = "sync-key"
_SYNC_ENTRY: Final = "key"
_UID_CHARS: Final = 8
_READABLE_BY_GROUP: Final = 0o440
_HEAD: Final = (
    "# API keys of the gateway, by the SHA-256 of each key. Add entries with `ragcache keys new`.\n"
)


def uses_keys(cache: RagCache, site: Site) -> bool:
    """Whether requests need a key: by default in a cluster, and not on one machine."""
    auth = cache.spec.gateway.auth
    return site.is_cluster if auth is None else auth.enabled


def generated_secret_name(cache: RagCache, site: Site) -> str | None:
    """Return the name of the Secret that the operator creates; None if it creates none."""
    auth = cache.spec.gateway.auth
    if not uses_keys(cache, site) or (auth is not None and auth.secret_ref is not None):
        return None
    return f"{object_name(cache, _SUFFIX)}-{site.owner[:_UID_CHARS]}".rstrip("-")


def secret(cache: RagCache, site: Site, name: str, random_bytes: bytes) -> Object:
    """Return the generated Secret: a key file with one admin key, and that key.

    Args:
        random_bytes: 32 bytes.
    """
    key = key_of(random_bytes)
    entry = entry_text(Caller("admin", scopes=frozenset({Scope.ADMIN})), key)
    return _secret(cache, site, name, {API_KEYS_FILE: _HEAD + entry, ADMIN_KEY: key})


def mounts(cache: RagCache, site: Site) -> tuple[Mount, ...]:
    """Return the mount of the key file alone: gateways do not get the admin key."""
    if not uses_keys(cache, site):
        return ()
    auth = cache.spec.gateway.auth
    name, entry = generated_secret_name(cache, site), API_KEYS_FILE
    if auth is not None and auth.secret_ref is not None:
        name, entry = auth.secret_ref.name, auth.secret_ref.key
    volume = {
        "secretName": name,
        "defaultMode": _READABLE_BY_GROUP,
        "items": [{"key": entry, "path": API_KEYS_FILE}],
    }
    return (Mount(_SUFFIX, API_KEYS_FOLDER, {"secret": volume}, read_only=True),)


def sync_secret(cache: RagCache, site: Site, keys: ComponentKeys) -> Object:
    """Return the Secret with the key of syncs. Its name follows from the key."""
    key = keys.key(SYNC, site.owner)
    return _secret(cache, site, _sync_secret_name(cache, key), {_SYNC_ENTRY: key})


def sync_variable(cache: RagCache, site: Site, keys: ComponentKeys) -> Object:
    """Return the environment variable of a sync's container with its key."""
    name = _sync_secret_name(cache, keys.key(SYNC, site.owner))
    reference = {"name": name, "key": _SYNC_ENTRY}
    return {"name": "RAGCACHE_API_KEY", "valueFrom": {"secretKeyRef": reference}}


def _sync_secret_name(cache: RagCache, key: str) -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()[:_UID_CHARS]
    return f"{object_name(cache, _SYNC_SUFFIX)}-{digest}"


def _secret(cache: RagCache, site: Site, name: str, entries: dict[str, str]) -> Object:
    child: Object = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": cache.metadata.namespace,
            "labels": labels(cache.metadata.name),
        },
        "type": "Opaque",
        "stringData": entries,
    }
    return with_owner(child, cache, site.owner)
