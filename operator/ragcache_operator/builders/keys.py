"""Keys of a RagCache: API keys, the operator's own keys, and those of plans and stored values.

The operator creates Secrets and reads none. Users change the keys in their Secrets, and pods read
the mounted files again.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ragcache_core.access.caller import Caller, Scope
from ragcache_core.access.key_file import (
    BUILTIN_SCOPES,
    KEY_BYTES,
    collection_key,
    entry_text,
    hash_text,
    key_of,
)
from ragcache_operator.builders.metadata import Object, labels, object_name, with_owner
from ragcache_operator.builders.placement import (
    API_KEYS_FILE,
    API_KEYS_FOLDER,
    DISK_KEY_FILE,
    DISK_KEY_FOLDER,
    ENGINE_KEYS_FOLDER,
    SIGNING_KEY_FILE,
    SIGNING_KEY_FOLDER,
    STORE_KEY_FILE,
    STORE_KEY_FOLDER,
    PlatformPlacement,
)
from ragcache_operator.builders.pod import Mount
from ragcache_operator.spec.ragcache import RagCache

OPERATOR: Final = "operator"
SYNC_KEY_PERIOD_S: Final = 30 * 86_400
"""Time after which the syncs of a collection get another key. The operator may not delete Secrets,
so that of each period stays as long as the collection."""

ADMIN_KEY: Final = "admin-key"
"""Entry of the generated Secret with the key itself, for the person who installs a RagCache."""

_API_KEYS: Final = "api-keys"
_ENGINE_KEYS: Final = "engine-keys"
_SIGNING_KEY: Final = "signing-key"
_STORE_KEY: Final = "store-key"
_DISK_KEY: Final = "disk-key"
_UID_CHARS: Final = 8
READABLE_BY_GROUP: Final = 0o440
"""The kubelet gives the file to the pod's group."""
_HEAD: Final = (
    "# API keys of the gateway, by the SHA-256 of each key. Add entries with `ragcache keys new`.\n"
)


@dataclass(frozen=True, slots=True)
class ComponentKeys:
    """The API keys of the operator's own clients: its self-test, and the Jobs of collections.

    They follow from one root key and the uid of a RagCache. So the operator needs to read no Secret
    of a namespace, and a gateway knows only the hashes, which are no secret.

    Args:
        root: Random bytes that only the operator has.
    """

    root: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.root) < KEY_BYTES:
            raise ValueError(f"the root key has {len(self.root)} bytes, and needs {KEY_BYTES}")

    def key(self, client: str, uid: str) -> str:
        """Return the key of a client for the RagCache of this uid."""
        text = f"ragcache-component-key-1\0{client}\0{uid}"
        return key_of(hmac.new(self.root, text.encode(), hashlib.sha256).digest())

    def collection_key(self, collection: str, uid: str, now_s: float) -> str:
        """Return the key of the syncs of one collection of the RagCache of this uid.

        It is the same for SYNC_KEY_PERIOD_S, and valid for one to two of these periods.

        Args:
            now_s: Unix time.
        """
        until_s = (int(now_s // SYNC_KEY_PERIOD_S) + 2) * SYNC_KEY_PERIOD_S
        return collection_key(collection, until_s, self._signing_key(uid).sign)

    def certificate_secret(self, uid: str) -> bytes:
        """Return what the certificates of the RagCache of this uid are made of."""
        return hmac.new(self.root, f"ragcache-tls-1\0{uid}".encode(), hashlib.sha256).digest()

    def hashes(self, uid: str) -> str:
        """Return the gateway's setting of built-in keys. None of it is secret."""
        hashes = [f"{name}={hash_text(self.key(name, uid))}" for name in BUILTIN_SCOPES]
        public = self._signing_key(uid).public_key().public_bytes_raw()
        return ",".join((*hashes, f"sync=ed25519:{public.hex()}"))

    def _signing_key(self, uid: str) -> Ed25519PrivateKey:
        text = f"ragcache-collection-keys-1\0{uid}"
        seed = hmac.new(self.root, text.encode(), hashlib.sha256).digest()
        return Ed25519PrivateKey.from_private_bytes(seed)


def uses_keys(cache: RagCache, placement: PlatformPlacement) -> bool:
    """Whether requests need a key: by default in a cluster, and not on one machine."""
    return asks_for_keys(cache) or (cache.spec.gateway.auth is None and placement.is_cluster)


def asks_for_keys(cache: RagCache) -> bool:
    """Whether a spec itself says that requests need a key or a token."""
    auth = cache.spec.gateway.auth
    return bool(cache.spec.gateway.oidc) if auth is None else auth.enabled


def api_key_secret_name(cache: RagCache, placement: PlatformPlacement) -> str | None:
    """Return the name of the Secret that the operator creates; None if it creates none."""
    auth = cache.spec.gateway.auth
    if not uses_keys(cache, placement) or (auth is not None and auth.secret_ref is not None):
        return None
    return unique_name(cache, placement, _API_KEYS)


def api_key_secret(
    cache: RagCache, placement: PlatformPlacement, name: str, random_bytes: bytes
) -> Object:
    """Return the generated Secret: a key file with one admin key, and that key.

    Args:
        random_bytes: 32 bytes.
    """
    key = key_of(random_bytes)
    entry = entry_text(Caller("admin", scopes=frozenset({Scope.ADMIN})), key)
    return secret(cache, placement, name, {API_KEYS_FILE: _HEAD + entry, ADMIN_KEY: key})


def api_key_mounts(cache: RagCache, placement: PlatformPlacement) -> tuple[Mount, ...]:
    """Return the mount of the key file alone: gateways do not get the admin key."""
    if not uses_keys(cache, placement):
        return ()
    auth = cache.spec.gateway.auth
    name, entry = api_key_secret_name(cache, placement), API_KEYS_FILE
    if auth is not None and auth.secret_ref is not None:
        name, entry = auth.secret_ref.name, auth.secret_ref.key
    volume = {
        "secretName": name,
        "defaultMode": READABLE_BY_GROUP,
        "items": [{"key": entry, "path": API_KEYS_FILE}],
    }
    return (Mount(_API_KEYS, API_KEYS_FOLDER, {"secret": volume}, read_only=True),)


def engine_key_mounts(cache: RagCache) -> tuple[Mount, ...]:
    """Return the mount of the API keys of servers that RagCache does not run, if they have any.

    A pod starts without a Secret that is missing, and its gateway reports the engine.
    """
    sources = [
        {
            "secret": {
                "name": engine.key_secret.name,
                "items": [{"key": engine.key_secret.key, "path": engine.name}],
                "optional": True,
            }
        }
        for engine in cache.spec.engines
        if engine.key_secret is not None
    ]
    if not sources:
        return ()
    volume = {"defaultMode": READABLE_BY_GROUP, "sources": sources}
    return (Mount(_ENGINE_KEYS, ENGINE_KEYS_FOLDER, {"projected": volume}, read_only=True),)


def signing_secret_name(cache: RagCache, placement: PlatformPlacement) -> str:
    """Return the name of the Secret with the key that signs plans."""
    return unique_name(cache, placement, _SIGNING_KEY)


def signing_secret(cache: RagCache, placement: PlatformPlacement, key: bytes) -> Object:
    """Return the Secret with one signing key. Kubernetes deletes it together with the RagCache.

    The gateway signs plans, and engines accept only plans with a valid signature.
    """
    name = signing_secret_name(cache, placement)
    return secret(cache, placement, name, {SIGNING_KEY_FILE: f"{key.hex()}\n"})


def signing_mount(cache: RagCache, placement: PlatformPlacement) -> Mount:
    """Return the mount of the folder. Kubernetes does not update a file that is mounted alone."""
    return _mount(_SIGNING_KEY, SIGNING_KEY_FOLDER, signing_secret_name(cache, placement))


def store_key_secret_name(cache: RagCache, placement: PlatformPlacement) -> str:
    """Return the name of the Secret with the key that names stored values."""
    return unique_name(cache, placement, _STORE_KEY)


def store_key_secret(cache: RagCache, placement: PlatformPlacement, key: bytes) -> Object:
    """Return the Secret with the store key. Kubernetes deletes it together with the RagCache."""
    name = store_key_secret_name(cache, placement)
    return secret(cache, placement, name, {STORE_KEY_FILE: f"{key.hex()}\n"})


def store_key_mount(cache: RagCache, placement: PlatformPlacement) -> Mount:
    """Return the mount of the store key, for gateways and engines. Shards do not get it."""
    return _mount(_STORE_KEY, STORE_KEY_FOLDER, store_key_secret_name(cache, placement))


def disk_key_secret_name(cache: RagCache, placement: PlatformPlacement) -> str | None:
    """Return the name of the Secret that the operator creates; None if it creates none."""
    encryption = cache.spec.cache_store.encryption
    if encryption is None or encryption.secret_ref is not None:
        return None
    return unique_name(cache, placement, _DISK_KEY)


def disk_key_secret(cache: RagCache, placement: PlatformPlacement, name: str, key: bytes) -> Object:
    """Return the Secret with a key of the values on disk. Kubernetes deletes it with the RagCache.

    The volumes of a deleted RagCache may stay. Without the key, no value on them can be read.
    """
    return secret(cache, placement, name, {DISK_KEY_FILE: f"{key.hex()}\n"})


def disk_key_mounts(cache: RagCache, placement: PlatformPlacement) -> tuple[Mount, ...]:
    """Return the mount of the keys of the values on disk, for shards alone."""
    encryption = cache.spec.cache_store.encryption
    if encryption is None:
        return ()
    if encryption.secret_ref is None:
        return (_mount(_DISK_KEY, DISK_KEY_FOLDER, unique_name(cache, placement, _DISK_KEY)),)
    given = encryption.secret_ref
    volume = {
        "secretName": given.name,
        "defaultMode": READABLE_BY_GROUP,
        "items": [{"key": given.key, "path": DISK_KEY_FILE}],
    }
    return (Mount(_DISK_KEY, DISK_KEY_FOLDER, {"secret": volume}, read_only=True),)


def _mount(name: str, folder: str, secret_name: str) -> Mount:
    volume = {"secretName": secret_name, "defaultMode": READABLE_BY_GROUP}
    return Mount(name, folder, {"secret": volume}, read_only=True)


def unique_name(cache: RagCache, placement: PlatformPlacement, suffix: str) -> str:
    """Return the name of a Secret, which is unique for each RagCache object.

    The operator cannot read the owner of an existing Secret. Another user may have created it, or
    it may belong to a deleted RagCache of the same name and be deleted soon.
    """
    return f"{object_name(cache, suffix)}-{placement.owner[:_UID_CHARS]}".rstrip("-")


def secret(
    cache: RagCache, placement: PlatformPlacement, name: str, entries: Mapping[str, str]
) -> Object:
    """Return a Secret that Kubernetes deletes together with the RagCache."""
    child: Object = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": cache.metadata.namespace,
            "labels": labels(cache.metadata.name),
        },
        "type": "Opaque",
        "stringData": dict(entries),
    }
    return with_owner(child, cache, placement.owner)
