"""Renders the Kubernetes objects of a RagCache as YAML."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ragcache_core.errors import InvalidInput
from ragcache_operator.builders import build_children
from ragcache_operator.builders.capabilities import OLDEST_MINOR, Capabilities
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.config import own_tag
from ragcache_operator.spec.ragcache import RagCache


def objects(cache: RagCache, capabilities: Capabilities | None = None) -> list[dict[str, Any]]:
    """Return the objects in the order of the builders, with the arguments of ``render_yaml``.

    Raises:
        InvalidInput: That cluster cannot run the object.
    """
    placement = ClusterPlacement(
        cache, own_tag(), capabilities=capabilities or Capabilities.latest()
    )
    return build_children(cache, placement)


def render_yaml(cache: RagCache, capabilities: Capabilities | None = None) -> str:
    """Render the objects in the order of the builders.

    Args:
        capabilities: Of the target cluster; None means a current one with all optional APIs.

    Raises:
        InvalidInput: That cluster cannot run the object.
    """
    children = objects(cache, capabilities)
    return yaml.dump_all(children, Dumper=_Dumper, sort_keys=False, explicit_start=True)


def capabilities_of(version: str) -> Capabilities:
    """Return the capabilities of a plain Kubernetes version such as 1.30. Raises InvalidInput."""
    found = re.fullmatch(r"v?1\.(\d{1,3})(\..*)?", version)
    if found is None or int(found[1]) < OLDEST_MINOR:
        raise InvalidInput(
            "--kube-version",
            f"{version!r} is none that is supported",
            f"write 1.{OLDEST_MINOR} or newer",
        )
    return Capabilities(int(found[1]))


class _Dumper(yaml.SafeDumper):
    """Writes repeated values in full, because readers do not expect YAML aliases here."""

    def ignore_aliases(self, data: object) -> bool:
        return True
