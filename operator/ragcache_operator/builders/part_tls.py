"""TLS between the parts: the certificates that pods and local processes get."""

from __future__ import annotations

from typing import Final

from ragcache_operator.builders.certificates import PERIOD_S, VALID_S
from ragcache_operator.builders.keys import READABLE_BY_GROUP, secret, unique_name
from ragcache_operator.builders.metadata import Object, labels, object_name
from ragcache_operator.builders.placement import TLS_FOLDER, PlatformPlacement
from ragcache_operator.builders.pod import Mount
from ragcache_operator.spec.cluster import IssuerRef
from ragcache_operator.spec.ragcache import RagCache
from ragcache_wire.peers.certificates import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE

_TLS: Final = "tls"
_ISSUED: Final = "certificate"


def platform_name(cache: RagCache) -> str:
    """Return the DNS name of a platform's certificate. No name server knows it."""
    return f"{cache.metadata.name}.{cache.metadata.namespace}.ragcache.internal"


def tls_dir(cache: RagCache, placement: PlatformPlacement) -> str | None:
    """Return the folder of the certificate, or None if the parts use no TLS."""
    return placement.tls_dir() if cache.spec.tls.enabled else None


def key_secret_name(cache: RagCache, placement: PlatformPlacement) -> str:
    """Return the name of the Secret with the private key."""
    return unique_name(cache, placement, _TLS)


def _is_made_here(cache: RagCache, placement: PlatformPlacement) -> bool:
    """Whether the operator makes the certificate itself."""
    tls = cache.spec.tls
    return tls.enabled and (tls.issuer_ref is None or not placement.capabilities.certificates)


def key_secret(cache: RagCache, placement: PlatformPlacement) -> Object | None:
    """Return the Secret with the private key, or None if pods need none."""
    if placement.certificate is None or not _is_made_here(cache, placement):
        return None
    name, key = key_secret_name(cache, placement), placement.certificate.private_key
    return secret(cache, placement, name, {KEY_FILE: key})


def build(cache: RagCache, placement: PlatformPlacement) -> list[Object]:
    """Return the ConfigMap with the certificate and the authorities, or what cert-manager reads.

    Neither is secret.
    """
    issuer, certificate = cache.spec.tls.issuer_ref, placement.certificate
    if not cache.spec.tls.enabled:
        return []
    if issuer is not None and not _is_made_here(cache, placement):
        return [_issued_certificate(cache, issuer, placement)]
    if certificate is None:
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
    if not _is_made_here(cache, placement):
        issued = {"secretName": _issued_name(cache, placement), "defaultMode": READABLE_BY_GROUP}
        return (Mount(_TLS, TLS_FOLDER, {"secret": issued}, read_only=True),)
    name = key_secret_name(cache, placement)
    volume = {
        "defaultMode": READABLE_BY_GROUP,
        "sources": [
            {"secret": {"name": name, "items": [{"key": KEY_FILE, "path": KEY_FILE}]}},
            {"configMap": {"name": object_name(cache, _TLS)}},
        ],
    }
    return (Mount(_TLS, TLS_FOLDER, {"projected": volume}, read_only=True),)


def _issued_name(cache: RagCache, placement: PlatformPlacement) -> str:
    return unique_name(cache, placement, _ISSUED)


def _issued_certificate(cache: RagCache, issuer: IssuerRef, placement: PlatformPlacement) -> Object:
    """Return the object for which cert-manager keeps a Secret with key and certificate."""
    return {
        "apiVersion": "cert-manager.io/v1",
        "kind": "Certificate",
        "metadata": {
            "name": object_name(cache, _TLS),
            "namespace": cache.metadata.namespace,
            "labels": labels(cache.metadata.name),
        },
        "spec": {
            "secretName": _issued_name(cache, placement),
            "dnsNames": [platform_name(cache)],
            "duration": f"{VALID_S // 3600}h0m0s",
            "renewBefore": f"{(VALID_S - PERIOD_S) // 3600}h0m0s",
            "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
            "usages": ["digital signature", "server auth", "client auth"],
            "issuerRef": {"name": issuer.name, "kind": issuer.kind, "group": "cert-manager.io"},
        },
    }
