"""What a server's answers say about its version and its optional APIs."""

from __future__ import annotations

import pytest

from ragcache_core.errors import RagCacheError
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.kube.discovery import capabilities_of


def test_optional_groups_are_found() -> None:
    names = (
        *("gateway.networking.k8s.io/v1", "custom.metrics.k8s.io/v1beta2"),
        "security.openshift.io/v1",
    )
    groups = [{"versions": [{"groupVersion": name}]} for name in names]
    found = capabilities_of({"minor": "31+"}, groups)
    assert found == Capabilities(31, http_route=True, custom_metrics=True, assigns_ids=True)


def test_an_older_cluster_is_refused_with_the_version_that_is_needed() -> None:
    with pytest.raises(RagCacheError, match=r"version 1\.28, and RagCache needs 1\.29 or newer"):
        capabilities_of({"minor": "28"}, [])
