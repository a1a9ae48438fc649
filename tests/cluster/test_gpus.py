"""Engines on GPUs wait for an extended resource, get it, and the object says so.

The node has no GPU. The tests write the extended resource into its status, which the scheduler and
the kubelet read, as a device plugin would.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cluster.operator_process import install, running_operator_process
from harness.cluster.timeline import step
from harness.processes import free_port
from ragcache_operator.kube.api import Api
from tests.cluster.cluster import Cluster
from tests.cluster.node import NODE_NAME
from tests.cluster.platform import NAME, NAMESPACE, Platform, make_namespace, quickstart

pytestmark = pytest.mark.timeout(600)

GPU = "nvidia.com/gpu"
_LIMIT_S = 120


@pytest.fixture(scope="module")
def platform(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A cluster with the operator, and a RagCache whose two engines want a GPU each."""

    async def install_kinds() -> None:
        async with await Api.connect(cluster.kubeconfig) as api:
            await install(api)

    asyncio.run(install_kinds())
    make_namespace(cluster)
    folder = tmp_path_factory.mktemp("operator")
    with running_operator_process(folder, cluster.kubeconfig, free_port()):
        small = {"memory": "64Mi", "cpu": "50m"}
        engine = {"name": "main", "device": "cuda", "replicas": 2, "resources": small}
        cluster.apply(quickstart(engines=[engine]))
        yield Platform(cluster)


def offer_gpus(cluster: Cluster, number: int) -> None:
    """Say that the node has as many GPUs, and wait until the scheduler may count on them."""
    patch = json.dumps({"status": {"capacity": {GPU: str(number)}}})
    cluster.kubectl(
        *("patch", "node", NODE_NAME, "--subresource=status", "--type=merge", f"--patch={patch}")
    )

    def is_allocatable() -> bool:
        status = cluster.get("node", NODE_NAME)["status"]
        return status["allocatable"].get(GPU, "0") == str(number)

    cluster.wait_until(is_allocatable, f"node with {number} GPUs", _LIMIT_S)


def wait_for(platform: Platform, condition: str, status: str, reason: str) -> dict[str, Any]:
    """Wait until a condition has a status and a reason, and return it."""

    def is_so() -> bool:
        found = platform.condition(condition)
        return (found.get("status"), found.get("reason")) == (status, reason)

    try:
        platform.cluster.wait_until(is_so, f"{condition} {status} {reason}", _LIMIT_S)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; status: {json.dumps(platform.status())}") from error
    return platform.condition(condition)


def doctor(platform: Platform, folder: Path) -> str:
    """Return what `ragcache doctor` says of the cluster for the object that is there."""
    live = platform.cluster.get("ragcache", NAME, NAMESPACE)
    wanted = {"metadata": {"name": NAME, "namespace": NAMESPACE}}
    manifest = folder / "docs.yaml"
    manifest.write_text(
        json.dumps({**{key: live[key] for key in ("apiVersion", "kind", "spec")}, **wanted})
    )
    return platform.ragcache("doctor", "--file", str(manifest))


def engines(platform: Platform) -> list[dict[str, Any]]:
    labels = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component=engine"
    return platform.cluster.get_all("pods", NAMESPACE, labels)


def test_without_a_device_plugin_the_object_names_the_missing_resource(platform: Platform) -> None:
    with step("no node has a GPU"):
        found = wait_for(platform, "GPUsAvailable", "False", "NoDevicePlugin")
        assert f"no node has {GPU}" in found["message"]
        wait_for(platform, "EnginesReady", "False", "NoDevicePlugin")
    for pod in engines(platform):
        [container] = pod["spec"]["containers"]
        assert container["resources"]["limits"][GPU] == "1"
        assert container["resources"]["requests"][GPU] == "1"
        env = {one["name"]: one.get("value") for one in container["env"]}
        assert env["RAGCACHE_DEVICE"] == "cuda"
        assert "nodeName" not in pod["spec"]


def test_with_too_few_gpus_one_engine_waits(platform: Platform) -> None:
    with step("one GPU for two engines"):
        offer_gpus(platform.cluster, 1)
        found = wait_for(platform, "GPUsAvailable", "False", "InsufficientGPUs")
        assert "the nodes have 1" in found["message"]
        assert f"Insufficient {GPU}" in found["message"]
    placed = [pod["spec"].get("nodeName") for pod in engines(platform)]
    assert sorted(map(str, placed)) == ["None", NODE_NAME]


def test_the_condition_clears_once_there_are_enough(platform: Platform, tmp_path: Path) -> None:
    with step("two GPUs for two engines"):
        offer_gpus(platform.cluster, 2)
        wait_for(platform, "GPUsAvailable", "True", "Assigned")
        assert "the nodes have 2, and the object asks for 2" in doctor(platform, tmp_path)
    assert [pod["spec"]["nodeName"] for pod in engines(platform)] == [NODE_NAME] * 2


def test_another_resource_is_missing_by_its_own_name(platform: Platform) -> None:
    mig = "nvidia.com/mig-3g.40gb"
    small = {"memory": "64Mi", "cpu": "50m"}
    engine = {"name": "main", "device": "cuda", "gpu": {"resource": mig}, "resources": small}
    with step("no node has a part of a GPU"):
        platform.patch({"engines": [engine]})
        found = wait_for(platform, "GPUsAvailable", "False", "NoDevicePlugin")
    assert f"no node has {mig}" in found["message"]
    assert platform.events("NoDevicePlugin")
