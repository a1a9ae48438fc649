"""Builders: what every pod of every valid RagCache holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import InvalidInput
from ragcache_operator.builders import build_children
from ragcache_operator.builders.objects import SPEC_HASH
from ragcache_operator.builders.site import ClusterSite
from ragcache_operator.manifest import load_manifest, parse_manifest
from ragcache_operator.quantity import parse_quantity

ROOT = Path(__file__).parents[2]

Object = dict[str, Any]


def build(name: str = "docs", **spec: Any) -> list[Object]:
    cache = parse_manifest(
        {
            "apiVersion": "ragcache.dev/v1alpha1",
            "kind": "RagCache",
            "metadata": {"name": name, "namespace": "team"},
            "spec": spec,
        }
    )
    return build_children(cache, ClusterSite.of(cache, tag="1"))


def of(children: list[Object], kind: str, name: str) -> Object:
    [found] = [c for c in children if (c["kind"], c["metadata"]["name"]) == (kind, name)]
    return found


def pods(children: list[Object]) -> dict[str, Object]:
    """Pod specs by component."""
    return {
        child["metadata"]["labels"]["app.kubernetes.io/component"]: child["spec"]["template"][
            "spec"
        ]
        for child in children
        if child["kind"] != "Service"
    }


def env_of(pod: Object) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}


specs = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(
            [
                {},
                {"source": "hf:Qwen/Qwen3-0.6B"},
                {"name": "m", "maxLength": 128, "dtype": "float16"},
            ]
        ),
        "gateway": st.builds(lambda port: {"port": port}, st.integers(1, 65535)),
        "retriever": st.sampled_from(
            [
                {},
                {"embedder": {"source": "http://e/v1", "model": "e"}},
                {"storage": {"size": "1Gi"}},
            ]
        ),
        "engines": st.builds(
            lambda name, memory, args: [{"name": name, "kvMemory": memory, "args": args}],
            st.from_regex(r"[a-z][a-z0-9]{0,14}", fullmatch=True),
            st.sampled_from(["1", "512Mi", "3G", "4Gi"]),
            st.lists(st.text(max_size=5), max_size=3),
        ),
        "cacheStore": st.sampled_from(
            [{}, {"memory": "1"}, {"memory": "2G", "disk": {"size": "1Ti"}}]
        ),
    },
)
names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)


@given(specs, names)
def test_every_platform_is_well_formed(spec: Object, name: str) -> None:
    children = build(name, **spec)
    json.dumps(children)
    assert len({(c["kind"], c["metadata"]["name"]) for c in children}) == len(children)
    for child in children:
        assert len(child["metadata"]["name"]) <= 63
        assert child["metadata"]["namespace"] == "team"
        assert child["metadata"]["labels"]["app.kubernetes.io/instance"] == name
    workloads = [c for c in children if c["kind"] != "Service"]
    services = [c for c in children if c["kind"] == "Service"]
    assert [w["metadata"]["name"] for w in workloads] == [s["metadata"]["name"] for s in services]
    for workload, service in zip(workloads, services, strict=True):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert service["spec"]["selector"].items() <= labels.items()
        [container] = workload["spec"]["template"]["spec"]["containers"]
        named = {port["name"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} == named


@given(specs)
def test_every_pod_is_restricted(spec: Object) -> None:
    for pod in pods(build(**spec)).values():
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for volume in pod["volumes"]:
            assert "hostPath" not in volume
        volumes = {volume["name"] for volume in pod["volumes"]} | {"data"}
        [container] = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert all(port["containerPort"] >= 1024 for port in container["ports"])


@given(specs)
def test_every_probe_asks_a_port_of_its_container(spec: Object) -> None:
    for pod in pods(build(**spec)).values():
        [container] = pod["containers"]
        ports = {port["containerPort"] for port in container["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            [handler] = [probe[name] for name in ("httpGet", "grpc") if name in probe]
            assert handler["port"] in ports


@given(specs)
def test_addresses_in_environments_are_those_of_services(spec: Object) -> None:
    children = build(**spec)
    served = {
        f"{service['metadata']['name']}.team.svc:{port['port']}"
        for service in children
        if service["kind"] == "Service"
        for port in service["spec"]["ports"]
    }
    gateway, engine = (env_of(pods(children)[part]) for part in ("gateway", "engine"))
    named = {
        gateway["RAGCACHE_RETRIEVER"],
        gateway["RAGCACHE_ENGINE_URL"].removeprefix("http://"),
        gateway["RAGCACHE_ENGINE_RECORDS"],
        gateway["RAGCACHE_CACHESTORE"],
        engine["RAGCACHE_CACHESTORE"],
    }
    assert named <= served


@given(specs)
def test_parts_agree_on_the_model(spec: Object) -> None:
    found = pods(build(**spec))
    gateway, retriever = env_of(found["gateway"]), env_of(found["retriever"])
    arguments = found["engine"]["containers"][0]["args"]

    def argument(name: str) -> str:
        return str(arguments[arguments.index(name) + 1])

    assert gateway["RAGCACHE_MODEL"] == retriever["RAGCACHE_MODEL"] == argument("--model")
    assert gateway["RAGCACHE_MODEL_NAME"] == argument("--served-model-name")
    assert gateway["RAGCACHE_MODEL_DTYPE"] == argument("--dtype")
    assert gateway["RAGCACHE_MAX_MODEL_LEN"] == argument("--max-model-len")


@given(specs, specs)
def test_a_hash_changes_exactly_when_its_object_does(one: Object, other: Object) -> None:
    def content(child: Object) -> Object:
        return {**child, "metadata": {**child["metadata"], "annotations": {}}}

    def digest(child: Object) -> str:
        return str(child["metadata"]["annotations"][SPEC_HASH])

    for mine, theirs in zip(build(**one), build(**other), strict=True):
        assert (digest(mine) == digest(theirs)) == (content(mine) == content(theirs))


def test_a_change_touches_only_its_component() -> None:
    before, after = build(), build(cacheStore={"memory": "2Gi"})
    changed = [b["metadata"]["name"] for b, a in zip(before, after, strict=True) if b != a]
    assert changed == ["docs-cachestore"]


@pytest.mark.parametrize("example", ["quickstart.yaml", "huggingface.yaml"])
def test_the_examples_satisfy_current_kubernetes_schemas(example: str) -> None:
    cache = load_manifest(ROOT / "examples" / example)
    for child in build_children(cache, ClusterSite.of(cache, tag="1")):
        kubernetes_validate.validate(child, "1.37", strict=True)


def test_the_engine_is_vllms_server_with_our_connector() -> None:
    children = build(engines=[{"kvMemory": "1500Mi", "args": ["--max-num-seqs", "4"]}])
    deployment = of(children, "Deployment", "docs-engine-main")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    arguments = container["args"]
    connector = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert connector == {
        "kv_connector": "RagCacheConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert arguments[-2:] == ["--max-num-seqs", "4"]
    env = env_of(deployment["spec"]["template"]["spec"])
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_a_hub_model_may_ask_the_hub() -> None:
    found = pods(build(model={"source": "hf:Qwen/Qwen3-0.6B"}))
    assert "HF_HUB_OFFLINE" not in env_of(found["engine"])
    assert env_of(found["gateway"])["RAGCACHE_MODEL"] == "Qwen/Qwen3-0.6B"


def test_the_store_fits_its_volume_and_its_memory() -> None:
    children = build(cacheStore={"memory": "2Gi", "disk": {"size": "10Gi"}})
    store = of(children, "StatefulSet", "docs-cachestore")
    [claim] = store["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "10Gi"
    pod = store["spec"]["template"]["spec"]
    env = env_of(pod)
    assert int(env["RAGCACHE_DISK_BYTES"]) < 10 << 30
    limit = parse_quantity(pod["containers"][0]["resources"]["limits"]["memory"])
    assert limit > int(env["RAGCACHE_MEMORY_BYTES"]) == 2 << 30
    assert {"name": "data", "mountPath": env["RAGCACHE_DATA_DIR"]} in pod["containers"][0][
        "volumeMounts"
    ]


def test_the_gateway_listens_high_and_its_service_where_asked() -> None:
    service = of(build(gateway={"port": 80}), "Service", "docs-gateway")
    assert service["spec"]["ports"] == [
        {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}
    ]


def test_a_folder_of_this_machine_is_refused_in_a_cluster() -> None:
    with pytest.raises(InvalidInput, match=r"^spec\.model\.source: path:/m is a folder of this"):
        build(model={"source": "path:/m"})
