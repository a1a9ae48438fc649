"""Shards beside engines: one pool, in pods with two containers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import kubernetes_validate
import pytest

from ragcache_cli.local.placement import LocalPlacement
from ragcache_operator.builders import build_children
from ragcache_operator.builders.capabilities import OLDEST_MINOR, Capabilities
from ragcache_operator.builders.placement import SOCKET_FOLDER
from ragcache_operator.spec.quantity import parse_quantity
from ragcache_wire.settings import CacheStoreSettings, EngineSettings
from tests.kit.operator import (
    NAMESPACE,
    Object,
    build,
    children_of,
    kinds_of,
    make_cache,
    of,
    selects,
    workloads_of,
)

STORE = {"placement": "colocated", "memory": "2Gi"}
ENGINES = [{"name": "main", "replicas": 2}, {"name": "more"}]


@pytest.fixture
def children() -> list[Object]:
    return build(engines=ENGINES, cacheStore=STORE)


def engines_of(children: list[Object]) -> list[Object]:
    """Return the StatefulSets of the engines."""
    sets = kinds_of(children, "StatefulSet")
    return [one for one in sets if "-engine-" in one["metadata"]["name"]]


def container(workload: Object, name: str) -> Object:
    [found] = [
        one for one in workload["spec"]["template"]["spec"]["containers"] if one["name"] == name
    ]
    return dict(found)


def env_in_pod(container: Object, pod: str) -> dict[str, str]:
    """Return the plain variables as the kubelet gives them to a pod of this name."""
    return {
        one["name"]: one["value"].replace("$(POD_NAME)", pod)
        for one in container["env"]
        if "value" in one
    }


def test_every_engine_has_a_shard_and_there_are_no_others(children: list[Object]) -> None:
    assert [one["metadata"]["name"] for one in engines_of(children)] == [
        "docs-engine-main",
        "docs-engine-more",
    ]
    for workload in workloads_of(children):
        names = [one["name"] for one in workload["spec"]["template"]["spec"]["containers"]]
        is_engine = "-engine-" in workload["metadata"]["name"]
        assert names == (["engine", "cachestore"] if is_engine else names[:1])
        assert names[0] != "cachestore"


def test_members_are_the_pods_of_all_engines_and_each_shard_is_one_of_them(
    children: list[Object],
) -> None:
    config = of(children, "ConfigMap", "docs-members")
    own = []
    for workload in engines_of(children):
        name = workload["metadata"]["name"]
        service = of(children, "Service", workload["spec"]["serviceName"])
        assert service["spec"]["publishNotReadyAddresses"] is True
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert selects({"matchLabels": service["spec"]["selector"]}, labels)
        for index in range(workload["spec"]["replicas"]):
            env = env_in_pod(container(workload, "cachestore"), f"{name}-{index}")
            own.append(env["RAGCACHE_OWN_ADDRESS"])
            host, _, port = own[-1].partition(":")
            assert host == f"{name}-{index}.{service['metadata']['name']}.{NAMESPACE}.svc"
            assert env["RAGCACHE_LISTEN"] == f"0.0.0.0:{port}"
    assert json.loads(config["data"]["cachestore.json"]) == {"members": own}
    assert len(own) == 3


def test_a_shard_shares_its_memory_with_the_engine_of_its_pod(children: list[Object]) -> None:
    sockets = set()
    for workload in engines_of(children):
        pod = workload["spec"]["template"]["spec"]
        for index in range(workload["spec"]["replicas"]):
            name = f"{workload['metadata']['name']}-{index}"
            sockets.add(env_in_pod(container(workload, "cachestore"), name)["RAGCACHE_DATA_SOCKET"])
        [volume] = [one for one in pod["volumes"] if one["name"] == "shared"]
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Mi"}
        seen = {
            one["name"]: [m for m in one["volumeMounts"] if m["name"] == "shared"]
            for one in pod["containers"]
        }
        mount = {"name": "shared", "mountPath": SOCKET_FOLDER}
        # The engine connects to the socket, and cannot put another one in its place.
        assert seen == {"engine": [{**mount, "readOnly": True}], "cachestore": [mount]}
        resources = container(workload, "cachestore")["resources"]
        assert parse_quantity(resources["requests"]["memory"]) > 2 << 30
        assert resources["limits"]["memory"] == resources["requests"]["memory"]
    # Each has the name of its pod, so that no engine takes another pod's shard for its own.
    assert len(sockets) == 3
    assert all(Path(one).parent == Path(SOCKET_FOLDER) for one in sockets)


def test_the_field_reaches_the_process(
    children: list[Object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both processes read their settings from the variables of their containers."""
    workload = engines_of(children)[0]
    keys = tmp_path / "keys"
    keys.write_text(f"{bytes(32).hex()}\n")
    members = tmp_path / "cachestore.json"
    members.write_text(of(children, "ConfigMap", "docs-members")["data"]["cachestore.json"])
    files = {
        "RAGCACHE_SIGNING_KEY_FILE": str(keys),
        "RAGCACHE_STORE_KEY_FILE": str(keys),
        "RAGCACHE_CACHESTORE": f"file:{members}",
    }

    def environment(name: str) -> None:
        env = env_in_pod(container(workload, name), "docs-engine-main-1") | files
        env.pop("RAGCACHE_TLS_DIR")
        for variable, value in env.items():
            monkeypatch.setenv(variable, value)

    environment("cachestore")
    shard = CacheStoreSettings()
    assert shard.data_socket == Path("/run/ragcache/docs-engine-main-1.sock")
    assert shard.owns_memory
    assert shard.cachestore is not None
    assert shard.own_address in shard.cachestore.current()
    environment("engine")
    engine = EngineSettings()
    assert engine.cachestore is not None
    assert engine.cachestore.current() == shard.cachestore.current()


def test_ports_volumes_and_mounts_of_a_pod_do_not_collide(children: list[Object]) -> None:
    for workload in engines_of(children):
        pod = workload["spec"]["template"]["spec"]
        ports = [port for one in pod["containers"] for port in one["ports"]]
        for field in ("name", "containerPort"):
            assert max(Counter(port[field] for port in ports).values()) == 1
        names = [one["name"] for one in pod["volumes"]]
        assert len(names) == len(set(names))
        claims = [one["metadata"]["name"] for one in workload["spec"]["volumeClaimTemplates"]]
        assert claims == ["data"]
        mounted = {
            one["name"]: {mount["name"] for mount in one["volumeMounts"]}
            for one in pod["containers"]
        }
        assert mounted["engine"] | mounted["cachestore"] == {*names, *claims}
        # Shards cannot read what tags are made with, and the containers share no other folder.
        assert "store-key" in mounted["engine"] - mounted["cachestore"]
        assert {"data", "scratch-beside"} <= mounted["cachestore"] - mounted["engine"]
        writable = {
            one["name"]: {m["name"] for m in one["volumeMounts"] if not m.get("readOnly")}
            for one in pod["containers"]
        }
        assert not writable["engine"] & writable["cachestore"]


@pytest.mark.parametrize("minor", [OLDEST_MINOR, 37])
def test_schemas_know_every_field(minor: int) -> None:
    cache = make_cache(engines=ENGINES, cacheStore={**STORE, "encryption": {}})
    for child in children_of(cache, Capabilities(minor)):
        kubernetes_validate.validate(child, f"1.{minor}", strict=True)


def test_on_one_machine_one_shard_is_beside_all_engines(tmp_path: Path) -> None:
    def built(placement: str) -> list[Object]:
        cache = make_cache(engines=ENGINES, cacheStore={**STORE, "placement": placement})
        return build_children(cache, LocalPlacement(tmp_path, 8080, iter(range(9000, 9100))))

    assert built("colocated") == built("separate")
    store = of(built("colocated"), "StatefulSet", "docs-cachestore")
    env = env_in_pod(container(store, "cachestore"), "")
    assert env["RAGCACHE_DATA_SOCKET"] == str(tmp_path / "run" / "cachestore.sock")
