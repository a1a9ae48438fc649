"""Replicas of the retriever choose their writer by a Lease of a real API server.

They have the rights of the Role that the operator makes, and no others.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.cluster.writer_election import WriterLease
from ragcache_operator.builders import build_children
from ragcache_operator.builders.site import ClusterSite
from ragcache_operator.spec.manifest import parse_manifest
from ragcache_retriever.replication.kubernetes_lease import KubernetesLease
from ragcache_retriever.replication.lease_store import LeaseUnavailable
from tests.cluster import packages
from tests.cluster.control_plane import ControlPlane
from tests.kit.replica_node import cluster_of, names, put, writer_of

NAMESPACE = "writer-lease"


def kubectl(plane: ControlPlane, *words: str, stdin: str | None = None) -> str:
    argv = [packages.command("kubectl"), f"--kubeconfig={plane.kubeconfig}", *words]
    run = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def children() -> list[dict[str, Any]]:
    """Return the objects of a RagCache with three retrievers."""
    cache = parse_manifest(
        {
            "apiVersion": "ragcache.dev/v1alpha1",
            "kind": "RagCache",
            "metadata": {"name": "docs", "namespace": NAMESPACE},
            "spec": {"retriever": {"replicas": 3}},
        }
    )
    return build_children(cache, ClusterSite.of(cache, tag="1"))


@pytest.fixture
def account(control_plane: ControlPlane, tmp_path: Path) -> Path:
    """A folder with a token of the retriever's ServiceAccount, as the kubelet mounts it."""
    wanted = [
        child
        for child in children()
        if child["metadata"]["name"] == "docs-retriever"
        and child["kind"] in ("ServiceAccount", "Role", "RoleBinding")
    ]
    assert len(wanted) == 3
    kubectl(control_plane, "create", "namespace", NAMESPACE)
    items = {"apiVersion": "v1", "kind": "List", "items": wanted}
    kubectl(control_plane, "apply", "-f", "-", stdin=json.dumps(items))
    token = kubectl(control_plane, "create", "token", "docs-retriever", "-n", NAMESPACE)
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text(token)
    (folder / "ca.crt").write_bytes(control_plane.certificates.authority.read_bytes())
    return folder


async def test_replicas_with_the_rights_of_their_role_survive_their_writer(
    control_plane: ControlPlane, account: Path, tmp_path: Path
) -> None:
    def open_lease(name: str = "docs-retriever-writer") -> KubernetesLease:
        return KubernetesLease(control_plane.url, NAMESPACE, name, account)

    async with cluster_of(tmp_path, open_lease) as nodes:
        first = await writer_of(nodes)
        others = [node for node in nodes if node is not first]
        await put(others[0], "kept")
        lease = json.loads(
            kubectl(
                control_plane,
                *("get", "lease", "docs-retriever-writer", "-n", NAMESPACE, "-o", "json"),
            )
        )
        assert lease["spec"]["leaseTransitions"] == 1
        assert lease["metadata"]["annotations"]["ragcache.dev/writer-address"] == first.address
        await first.stop(release=False)
        second = await writer_of(others)
        assert await names(second, "kept") == ["kept"]
        await put(others[0], "after")
        # A deleted Lease is made again, in a later epoch.
        kubectl(control_plane, "delete", "lease", "docs-retriever-writer", "-n", NAMESPACE)
        await first.start()
        third = await writer_of(nodes)
        await put(third, "later")
        assert third.replica.position().epoch >= 2
        assert await names(third, "kept", "after", "later") == ["kept", "after", "later"]

    other = open_lease("operator")
    with pytest.raises(LeaseUnavailable, match="403"):
        await other.read()
    with pytest.raises(LeaseUnavailable, match="403"):
        await other.write(WriterLease("a", "a:1", 1, 8.0, 3, "7"))
    await other.close()
