"""TLS between the parts: the certificates that pods and local processes get."""

from __future__ import annotations

from typing import Final

from ragcache_operator.builders.certificates import IssuedCertificate
from ragcache_operator.builders.keys import READABLE_BY_GROUP, secret, unique_name
from ragcache_operator.builders.metadata import Object, labels, object_name
from ragcache_operator.builders.placement import TLS_FOLDER, PlatformPlacement
from ragcache_operator.builders.pod import Mount
from ragcache_operator.spec.ragcache import RagCache
from ragcache_wire.peers.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE

_TLS: Final = "tls"


def platform_name(cache: RagCache) -> str:
    """Return the DNS name of a platform's certificate. No name server knows it."""
    return f"{cache.metadata.name}.{cache.metadata.namespace}.ragcache.internal"


def tls_dir(cache: RagCache, placement: PlatformPlacement) -> str | None:
    """Return the folder of the certificate, or None if the parts use no TLS."""
    return placement.tls_dir() if cache.spec.tls.enabled else None


def key_secret_name(cache: RagCache, placement: PlatformPlacement) -> str:
    """Return the name of the Secret with the private key."""
    return unique_name(cache, placement, _TLS)


def key_secret(cache: RagCache, placement: PlatformPlacement) -> Object | None:
    """Return the Secret with the private key, or None if pods need none."""
    if placement.certificate is None or not cache.spec.tls.enabled:
        return None
    name, key = key_secret_name(cache, placement), placement.certificate.private_key
    return secret(cache, placement, name, {KEY_FILE: key})


def certificate_config_map(cache: RagCache, certificate: IssuedCertificate | None) -> list[Object]:
    """Return the ConfigMap with the certificate and the authorities. Neither is secret."""
    if certificate is None or not cache.spec.tls.enabled:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": object_name(cache, _TLS),
                "namespace": cache.metadata.namespace,
                "labels": labels(cache.metadata.name),
            },
            "data": {
                CERTIFICATE_FILE: certificate.chain,
                AUTHORITIES_FILE: certificate.authorities,
            },
        }
    ]


def tls_mounts(cache: RagCache, placement: PlatformPlacement) -> tuple[Mount, ...]:
    """Return the mount of the key and the certificate, which the kubelet changes together."""
    if not cache.spec.tls.enabled:
        return ()
    name = key_secret_name(cache, placement)
    volume = {
        "defaultMode": READABLE_BY_GROUP,
        "sources": [
            {"secret": {"name": name, "items": [{"key": KEY_FILE, "path": KEY_FILE}]}},
            {"configMap": {"name": object_name(cache, _TLS)}},
        ],
    }
    return (Mount(_TLS, TLS_FOLDER, {"projected": volume}, read_only=True),)
