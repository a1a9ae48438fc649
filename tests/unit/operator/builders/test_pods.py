"""What a spec sets about the pods of all components: template, environment, proxy and security."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.shared_environment import shared_environment
from tests.kit.operator import (
    Object,
    build,
    children_of,
    container_of,
    env_of,
    kinds_of,
    make_cache,
    of,
    pod_of,
    workloads_of,
)

PARTS = ("cachestore", "retriever", "engine-main", "gateway")
PROXY = "http://proxy.example.com:3128"
IDS = {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}


def security(children: list[Object], part: str = "gateway") -> dict[str, Any]:
    found: dict[str, Any] = pod_of(children, part)["securityContext"]
    return found


def ids(context: Object) -> Object:
    return {name: value for name, value in context.items() if name in IDS}


def test_pods_have_fixed_ids_by_default() -> None:
    for part in PARTS:
        assert ids(security(build(), part)) == IDS


@pytest.mark.parametrize("given", [{}, {"runAsUser": None}])
def test_an_empty_security_context_leaves_all_ids_to_the_cluster(given: Object) -> None:
    children = build(podTemplate={"securityContext": given})
    for part in PARTS:
        context = security(children, part)
        assert ids(context) == {}
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_openshift_chooses_the_ids_unless_the_spec_does() -> None:
    openshift = Capabilities(37, assigns_ids=True)
    assert ids(security(children_of(make_cache(), openshift))) == {}
    own = make_cache(podTemplate={"securityContext": {"runAsUser": 2000, "fsGroup": 3000}})
    assert ids(security(children_of(own, openshift))) == {"runAsUser": 2000, "fsGroup": 3000}


def test_the_users_name_does_not_depend_on_the_image() -> None:
    assert all(env_of(build(), part)["USER"] == "ragcache" for part in PARTS)


def test_labels_are_merged_and_other_fields_replaced() -> None:
    children = build(
        podTemplate={
            "labels": {"team": "a", "tier": "all"},
            "nodeSelector": {"pool": "rag"},
            "priorityClassName": "high",
        },
        retriever={"podTemplate": {"labels": {"tier": "data"}, "nodeSelector": {}}},
    )
    [retriever] = [w for w in workloads_of(children) if w["metadata"]["name"] == "docs-retriever"]
    labels = retriever["spec"]["template"]["metadata"]["labels"]
    assert {"team": "a", "tier": "data"}.items() <= labels.items()
    assert "nodeSelector" not in pod_of(children, "retriever")
    assert pod_of(children, "retriever")["priorityClassName"] == "high"
    assert pod_of(children, "gateway")["nodeSelector"] == {"pool": "rag"}
    assert "team" not in retriever["spec"]["selector"]["matchLabels"]


def test_constraints_of_the_spec_select_the_workloads_own_pods() -> None:
    zone = {"topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    children = build(podTemplate={"topologySpreadConstraints": [zone]})
    [constraint] = pod_of(children, "gateway")["topologySpreadConstraints"]
    assert constraint.items() >= {**zone, "maxSkew": 1}.items()
    selected = constraint["labelSelector"]["matchLabels"]
    assert selected["app.kubernetes.io/component"] == "gateway"


def test_every_pod_has_the_environment_and_it_overrides_ours() -> None:
    variables = [
        {"name": "HF_ENDPOINT", "value": "https://mirror.example.com"},
        {"name": "HOME", "value": "/data"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "team", "key": "token"}}},
        {"name": "REGION", "valueFrom": {"configMapKeyRef": {"name": "site", "key": "region"}}},
    ]
    children = build(env=variables)
    for part in PARTS:
        assert env_of(children, part)["HF_ENDPOINT"] == "https://mirror.example.com"
        assert env_of(children, part)["HOME"] == "/data"
        found = {v["name"]: v.get("valueFrom") for v in container_of(children, part)["env"]}
        assert found["TOKEN"] == {"secretKeyRef": {"name": "team", "key": "token"}}
        assert found["REGION"] == {"configMapKeyRef": {"name": "site", "key": "region"}}


@pytest.mark.parametrize(
    "spec",
    [
        {"proxy": {"https": PROXY}},
        {"env": [{"name": "HTTPS_PROXY", "value": PROXY}]},
        {"env": [{"name": "https_proxy", "value": PROXY}]},
    ],
)
def test_names_inside_the_cluster_never_go_through_a_proxy(spec: Object) -> None:
    for part in PARTS:
        found = env_of(build(**spec), part)
        for name in ("NO_PROXY", "no_proxy"):
            assert {"localhost", "127.0.0.1", ".svc"} <= set(found[name].split(","))


def test_a_proxy_is_set_in_both_cases_and_keeps_the_hosts_of_the_spec() -> None:
    spec: Object = {
        "proxy": {"http": PROXY, "noProxy": [".example.org"]},
        "env": [{"name": "NO_PROXY", "value": "10.0.0.0/8, a.b"}],
        "retriever": {"embedder": {"source": "http://embeddings:8080/v1", "model": "e"}},
    }
    found = env_of(build(**spec), "retriever")
    assert found["HTTP_PROXY"] == found["http_proxy"] == PROXY
    assert "HTTPS_PROXY" not in found
    hosts = set(found["no_proxy"].split(","))
    assert {".example.org", "10.0.0.0/8", "a.b", "embeddings"} <= hosts


def test_without_a_proxy_nothing_is_set() -> None:
    assert shared_environment(make_cache(), is_cluster=True) == {}
    assert shared_environment(make_cache(proxy={"http": PROXY}), is_cluster=False) == {}


def test_network_policies_allow_the_proxy_and_the_mirror() -> None:
    mirror = {"name": "HF_ENDPOINT", "value": "https://hub.example.com:8443"}
    children = build(proxy={"https": "http://10.1.2.3:3128"}, env=[mirror])
    [proxy, hub] = of(children, "NetworkPolicy", "docs-retriever")["spec"]["egress"][-2:]
    assert proxy["to"] == [{"ipBlock": {"cidr": "10.1.2.3/32"}}]
    assert [port["port"] for port in (*proxy["ports"], *hub["ports"])] == [3128, 8443]


@pytest.mark.parametrize(
    ("value", "ports"),
    [
        ("http://p:70000", []),
        ("http://p:$(PORT)", []),
        ("http://[::1", []),
        ("proxy.corp.example.com:3128", [3128]),
    ],
)
def test_an_address_in_the_environment_stops_nothing(value: str, ports: list[int]) -> None:
    def egress(children: list[Object]) -> list[Object]:
        found: list[Object] = of(children, "NetworkPolicy", "docs-retriever")["spec"]["egress"]
        return found

    more = egress(build(env=[{"name": "HTTPS_PROXY", "value": value}]))[len(egress(build())) :]
    assert [port["port"] for rule in more for port in rule["ports"]] == ports


def test_the_telemetry_of_the_cache_store_may_go_through_the_proxy() -> None:
    otlp = {"otlp": {"endpoint": "https://o.example.com:4318"}}
    children = build(proxy={"https": "http://10.1.2.3:3128"}, telemetry=otlp)
    egress = of(children, "NetworkPolicy", "docs-cachestore")["spec"]["egress"]
    assert any(rule.get("to") == [{"ipBlock": {"cidr": "10.1.2.3/32"}}] for rule in egress)


def test_authorities_are_mounted_and_named_for_every_program() -> None:
    children = build(trustedCA={"configMap": "authorities", "key": "all.pem"})
    for part in PARTS:
        [volume] = [v for v in pod_of(children, part)["volumes"] if v["name"] == "trusted-ca"]
        items = [{"key": "all.pem", "path": "ca.crt"}]
        assert volume["configMap"] == {"name": "authorities", "items": items}
        file = "/etc/ragcache/trusted-ca/ca.crt"
        found = env_of(children, part)
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO"):
            assert found[name] == file


def test_a_quota_of_cpu_limits_admits_every_pod() -> None:
    limit = {"resources": {"cpuLimit": "500m"}}
    children = build(
        gateway=limit, retriever=limit, engines=[{"name": "main", **limit}], cacheStore=limit
    )
    for part in PARTS:
        found = container_of(children, part)["resources"]
        assert found["limits"]["cpu"] == "500m"
        assert found["requests"]["cpu"] in ("100m", "250m", "500m")


@pytest.mark.parametrize(("limit", "threads"), [("3500m", "3"), ("500m", "1"), ("8", "8")])
def test_an_engine_starts_as_many_threads_as_its_limit_has_cores(limit: str, threads: str) -> None:
    engine = {"name": "main", "resources": {"cpuLimit": limit}}
    found = env_of(build(engines=[engine]), "engine-main")
    assert found["OMP_NUM_THREADS"] == threads
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "OMP_NUM_THREADS" not in env_of(build(), "engine-main")


def test_an_external_service_exposes_questions_alone() -> None:
    given = {
        "annotations": {"example.com/internal": "true"},
        "loadBalancerClass": "example.com/lb",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
    }
    children = build(gateway={"port": 80, "service": given})
    external = of(children, "Service", "docs-gateway-external")
    assert external["metadata"]["annotations"]["example.com/internal"] == "true"
    assert external["spec"]["type"] == "LoadBalancer"
    assert external["spec"]["loadBalancerClass"] == "example.com/lb"
    assert external["spec"]["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    [port] = external["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (80, "http")
    inner = of(children, "Service", "docs-gateway")["spec"]
    assert external["spec"]["selector"] == inner["selector"]
    assert inner["type"] == "ClusterIP"


def test_without_a_service_nothing_is_exposed() -> None:
    types = {service["spec"]["type"] for service in kinds_of(build(), "Service")}
    assert types == {"ClusterIP"}
