"""Settings of the operator, and what it gives to every RagCache."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final

from ragcache_core.access.networks import parse_networks
from ragcache_core.errors import InvalidInput
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.certificates import CertificateAuthority
from ragcache_operator.builders.keys import ComponentKeys
from ragcache_operator.builders.part_tls import platform_name
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.spec.ragcache import COMPONENTS, RagCache

ROOT_KEY_SECRET: Final = "ragcache-operator-root-key"

RUN_IMAGES: Final = (*COMPONENTS, "engine-cuda", "retriever-cuda", "tools")
"""Images that the operator runs."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """Settings of one operator process."""

    # Namespace of the operator, for its Lease and its root key.
    namespace: str
    # Name of this replica, usually the name of its pod.
    identity: str
    # Namespaces whose objects the operator serves. Empty for all.
    namespaces: tuple[str, ...] = ()
    # Registry and path before the name of an image.
    images: str = "ragcache"
    # Tag of the images.
    tag: str = ""
    # Digest by image, in place of the tag.
    image_digests: Mapping[str, str] = field(default_factory=dict)
    # Lease for the election of one replica. Empty if this is the only replica.
    lease: str = ""
    # Secret with the root of the operator's own API keys, in its namespace.
    root_key_secret: str = ROOT_KEY_SECRET
    # Networks that are not public, and that sources of collections may have. Only the administrator
    # of the cluster sets them: authors of a collection choose its URLs.
    source_networks: tuple[str, ...] = ()
    # The same for issuers of tokens, whose URLs authors of a RagCache choose.
    issuer_networks: tuple[str, ...] = ()
    listen_port: int = 8080
    log_level: int = logging.INFO

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> OperatorConfig:
        """Read RAGCACHE_* variables and POD_NAME. Raises InvalidInput for an invalid variable."""
        return cls(
            namespace=_label(environ, "RAGCACHE_OPERATOR_NAMESPACE", "ragcache-system"),
            identity=environ.get("POD_NAME", "").strip() or "operator",
            namespaces=_namespaces(environ.get("RAGCACHE_NAMESPACES", "")),
            images=environ.get("RAGCACHE_IMAGES", "").strip().rstrip("/") or "ragcache",
            tag=environ.get("RAGCACHE_IMAGE_TAG", "").strip() or own_tag(),
            image_digests=_digests(environ.get("RAGCACHE_IMAGE_DIGESTS", "")),
            lease=_label(environ, "RAGCACHE_LEASE", ""),
            root_key_secret=_label(environ, "RAGCACHE_ROOT_KEY_SECRET", ROOT_KEY_SECRET),
            source_networks=_networks(environ, "RAGCACHE_SOURCE_NETWORKS"),
            issuer_networks=_networks(environ, "RAGCACHE_ISSUER_NETWORKS"),
            listen_port=_port(environ, "RAGCACHE_LISTEN_PORT", 8080),
            log_level=_log_level(environ),
        )


@dataclass(frozen=True, slots=True)
class Installation:
    """What the operator gives to every RagCache.

    Args:
        keys: The operator's own API keys.
    """

    config: OperatorConfig
    capabilities: Capabilities
    keys: ComponentKeys

    def placement(self, cache: RagCache, uid: str) -> ClusterPlacement:
        """Return where a RagCache of this uid runs."""
        authority = CertificateAuthority(self.keys.certificate_secret(uid), platform_name(cache))
        return ClusterPlacement(
            cache,
            self.config.tag,
            self.config.images,
            self.capabilities,
            uid,
            self.config.namespace,
            self.keys.hashes(uid),
            self.config.source_networks,
            self.config.issuer_networks,
            self.config.image_digests,
            authority.issue(time.time()),
        )


def own_tag() -> str:
    """Return the tag of the images of this release.

    Image tags allow every character of a PEP 440 version except '+'.
    """
    return version("ragcache").replace("+", "-")


def _namespaces(text: str) -> tuple[str, ...]:
    names = tuple(name for part in text.split(",") if (name := part.strip()))
    for name in names:
        if not _LABEL.fullmatch(name):
            raise InvalidInput(
                "RAGCACHE_NAMESPACES",
                f"{name!r} is not a namespace",
                "set names separated by commas",
            )
    return names


def _digests(text: str) -> dict[str, str]:
    digests: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, digest = part.partition("=")
        if name not in RUN_IMAGES or not _DIGEST.fullmatch(digest):
            raise InvalidInput(
                "RAGCACHE_IMAGE_DIGESTS",
                f"{part!r} is no digest of an image",
                f"set IMAGE=sha256:... with one of {', '.join(RUN_IMAGES)}, separated by commas",
            )
        digests[name] = digest
    return digests


def _networks(environ: Mapping[str, str], variable: str) -> tuple[str, ...]:
    texts = [text.strip() for text in environ.get(variable, "").split(",") if text.strip()]
    return tuple(map(str, parse_networks(variable, texts)))


def _label(environ: Mapping[str, str], variable: str, default: str) -> str:
    value = environ.get(variable, "").strip() or default
    if value and not _LABEL.fullmatch(value):
        raise InvalidInput(
            variable, f"{value!r} is not a DNS label", "use lower-case letters, digits and '-'"
        )
    return value


def _port(environ: Mapping[str, str], variable: str, default: int) -> int:
    text = environ.get(variable, "").strip() or str(default)
    if not text.isascii() or not text.isdigit() or not 0 <= int(text) <= 65_535:
        raise InvalidInput(variable, f"{text!r} is not a port", "set a number from 1 to 65535")
    return int(text)


def _log_level(environ: Mapping[str, str]) -> int:
    value = environ.get("RAGCACHE_LOG_LEVEL", "").strip() or "info"
    level = logging.getLevelNamesMapping().get(value.upper())
    if level is None:
        raise InvalidInput(
            "RAGCACHE_LOG_LEVEL", f"is {value!r}", "set debug, info, warning or error"
        )
    return level
