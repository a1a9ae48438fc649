"""The Kubernetes objects of a RagCache as YAML."""

from __future__ import annotations

import yaml

from ragcache_operator.builders import build_children
from ragcache_operator.builders.site import ClusterSite
from ragcache_operator.config import own_tag
from ragcache_operator.spec import RagCache


def render_yaml(cache: RagCache) -> str:
    """Documents in the order of the builders. Raises InvalidInput for what no cluster can run."""
    children = build_children(cache, ClusterSite.of(cache, tag=own_tag()))
    return yaml.dump_all(children, Dumper=_Dumper, sort_keys=False, explicit_start=True)


class _Dumper(yaml.SafeDumper):
    """Writes a value that occurs twice twice: an alias is nothing that people expect here."""

    def ignore_aliases(self, data: object) -> bool:
        return True
