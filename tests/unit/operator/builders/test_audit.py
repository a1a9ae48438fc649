"""Where the audit log of a gateway goes, by spec.gateway.audit."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core.errors import InvalidInput
from tests.kit.operator import build, container_of, env_of, make_cache, pod_of


def gateway(audit: dict[str, Any]) -> list[Any]:
    return build(gateway={"audit": audit})


def test_without_the_field_there_is_none() -> None:
    assert "RAGCACHE_AUDIT" not in env_of(build(), "gateway")


def test_an_empty_object_writes_to_standard_output() -> None:
    children = gateway({})
    assert env_of(children, "gateway")["RAGCACHE_AUDIT"] == "stdout"
    assert "audit" not in {one["name"] for one in pod_of(children, "gateway")["volumes"]}


def test_each_pod_has_a_file_of_its_own_on_a_claim() -> None:
    children = gateway({"claim": "audit-logs", "maxSize": "2Gi"})
    env = env_of(children, "gateway")
    assert env["RAGCACHE_AUDIT_MAX_BYTES"] == str(2 << 30)
    variables = [one["name"] for one in container_of(children, "gateway")["env"]]
    assert env["RAGCACHE_AUDIT"] == "/var/log/ragcache/$(POD_NAME).jsonl"
    # The kubelet expands variables that come before.
    assert variables.index("POD_NAME") < variables.index("RAGCACHE_AUDIT")
    volumes = {one["name"]: one for one in pod_of(children, "gateway")["volumes"]}
    assert volumes["audit"]["persistentVolumeClaim"] == {"claimName": "audit-logs"}
    mounts = {one["name"]: one for one in container_of(children, "gateway")["volumeMounts"]}
    assert mounts["audit"] == {"name": "audit", "mountPath": "/var/log/ragcache"}


@pytest.mark.parametrize("audit", [{"claim": "Not/valid"}, {"maxSize": "much"}, {"path": "/x"}])
def test_a_wrong_field_is_named(audit: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"spec\.gateway\.audit"):
        make_cache(gateway={"audit": audit})
