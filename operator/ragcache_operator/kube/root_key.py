"""The operator's root key, in a Secret of its own namespace that all replicas share."""

from __future__ import annotations

import base64
import binascii
import secrets
from typing import Final

from ragcache_core.errors import InvalidInput
from ragcache_operator.kube.api import Api, Conflict
from ragcache_operator.kube.resources import SECRETS, Object

ROOT_KEY_BYTES: Final = 32
_ENTRY: Final = "key"


async def load_root_key(api: Api, namespace: str, name: str) -> bytes:
    """Return the key of the Secret. Create the Secret if there is none.

    Raises:
        InvalidInput: The Secret has no usable key.
        ApiError: The API server refuses, or does not answer.
    """
    found = await api.get(SECRETS, name, namespace)
    if found is None:
        try:
            await api.create(SECRETS, _secret(namespace, name))
        except Conflict as error:
            if error.reason != "AlreadyExists":
                raise
        found = await api.get(SECRETS, name, namespace)
    return _key_of(name, found or {})


def _secret(namespace: str, name: str) -> Object:
    key = secrets.token_bytes(ROOT_KEY_BYTES)
    return {
        "apiVersion": SECRETS.api_version,
        "kind": SECRETS.kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": "ragcache-operator"},
        },
        "type": "Opaque",
        "data": {_ENTRY: base64.b64encode(key).decode("ascii")},
    }


def _key_of(name: str, secret: Object) -> bytes:
    try:
        key = base64.b64decode((secret.get("data") or {})[_ENTRY], validate=True)
    except (KeyError, TypeError, binascii.Error):
        key = b""
    if len(key) < ROOT_KEY_BYTES:
        raise InvalidInput(
            f"Secret {name}", f"has no {_ENTRY!r} of {ROOT_KEY_BYTES} bytes", "delete the Secret"
        )
    return key
