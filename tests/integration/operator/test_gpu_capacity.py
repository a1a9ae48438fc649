"""The GPUs of nodes, as the operator reads them with and without the permission."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.cluster.control_plane import ControlPlane, start_control_plane
from harness.cluster.kubeconfig import User
from ragcache_operator.kube.api import Api
from ragcache_operator.kube.resources import NODES
from ragcache_operator.reconcile.status_reporter import read_gpu_capacity
from tests.integration.operator.operator_pass import plane_or_skip

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-3g.40gb"
WITHOUT_RIGHTS = User("operator-without-nodes", ())


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server with a user who may do nothing."""
    folder = tmp_path_factory.mktemp("plane")
    with plane_or_skip(lambda: start_control_plane(folder, users=[WITHOUT_RIGHTS])) as plane:
        yield plane


async def test_the_gpus_of_all_nodes_are_counted(plane: ControlPlane) -> None:
    resources = frozenset({GPU, MIG})
    async with await Api.connect(plane.kubeconfig) as admin:
        assert await read_gpu_capacity(admin, resources) == {GPU: 0, MIG: 0}
        for name, number in (("a", 2), ("b", 1)):
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            await admin.create(NODES, node)
            amount = {GPU: str(number)}
            status = {"status": {"capacity": amount, "allocatable": amount}}
            await admin.merge(NODES, name, None, status, "status")
        assert await read_gpu_capacity(admin, resources) == {GPU: 3, MIG: 0}


async def test_without_the_permission_nothing_is_known(plane: ControlPlane) -> None:
    async with await Api.connect(plane.kubeconfig_for(WITHOUT_RIGHTS)) as api:
        assert await read_gpu_capacity(api, frozenset({GPU})) is None
