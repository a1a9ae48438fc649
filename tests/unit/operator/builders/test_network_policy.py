"""NetworkPolicies allow the connections that a RagCache needs, and no others."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from pathlib import Path

import pytest
import yaml
from hypothesis import given

from ragcache_operator.builders import network_policy
from ragcache_operator.builders.autoscaling import REPLICA_RANGE
from ragcache_operator.builders.capabilities import Capabilities
from ragcache_operator.builders.metadata import SYNC_COMPONENT, labels
from ragcache_operator.builders.placement import ClusterPlacement
from tests.kit.operator import (
    NAMESPACE,
    OPERATOR_NAMESPACE,
    Object,
    build,
    capabilities,
    children_of,
    kinds_of,
    make_cache,
    selects,
    specs,
    workloads_of,
)


@dataclass(frozen=True)
class Pod:
    """A pod. ``namespace_labels`` are further labels of its namespace, next to the name."""

    name: str
    namespace: str
    labels: Object = field(default_factory=dict)
    namespace_labels: Object = field(default_factory=dict)

    @property
    def labels_of_namespace(self) -> Object:
        return {"kubernetes.io/metadata.name": self.namespace, **self.namespace_labels}


@dataclass(frozen=True)
class Outside:
    """A machine outside the cluster."""

    name: str
    address: str


Peer = Pod | Outside


def may_talk(
    policies: Sequence[Object], source: Peer, target: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Whether a source may connect to a target's port."""
    leaves = not isinstance(source, Pod) or _lets(
        policies, source, "Egress", target, port, protocol
    )
    enters = not isinstance(target, Pod) or _lets(
        policies, target, "Ingress", source, port, protocol
    )
    return leaves and enters


def _lets(
    policies: Sequence[Object],
    pod: Pod,
    direction: str,
    other: Peer,
    port: int,
    protocol: str,
) -> bool:
    applying = [
        policy
        for policy in policies
        if policy["metadata"]["namespace"] == pod.namespace
        and direction in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], pod.labels)
    ]
    if not applying:
        return True
    rules, peers = {"Ingress": ("ingress", "from"), "Egress": ("egress", "to")}[direction]
    return any(
        _rule_matches(rule, peers, pod.namespace, other, port, protocol)
        for policy in applying
        for rule in policy["spec"].get(rules, ())
    )


def _rule_matches(
    rule: Object, peers: str, namespace: str, other: Peer, port: int, protocol: str
) -> bool:
    ports = rule.get("ports")
    if ports and not any(p["port"] == port and p["protocol"] == protocol for p in ports):
        return False
    named = rule.get(peers)
    return not named or any(_peer_matches(peer, namespace, other) for peer in named)


def _peer_matches(peer: Object, namespace: str, other: Peer) -> bool:
    if "ipBlock" in peer:
        if not isinstance(other, Outside):
            return False
        address, block = ipaddress.ip_address(other.address), peer["ipBlock"]
        closed = map(ipaddress.ip_network, block.get("except", ()))
        return address in ipaddress.ip_network(block["cidr"]) and not any(
            address in one for one in closed
        )
    if not isinstance(other, Pod):
        return False
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], other.labels_of_namespace):
            return False
    elif other.namespace != namespace:
        return False
    return selects(peer.get("podSelector", {}), other.labels)


EXAMPLES = Path(__file__).parents[4] / "examples" / "kubernetes"
KEDA = EXAMPLES / "keda-scaledobject.yaml"
ADAPTER = EXAMPLES / "prometheus-adapter-values.yaml"
PORTS = (8000, 8001, 50051, 50052, 8081, 9464, 53, 443, 80, 22)
OPERATOR = Pod("operator", OPERATOR_NAMESPACE, {"app.kubernetes.io/name": "ragcache-operator"})
IMPOSTOR = Pod("impostor", "elsewhere", OPERATOR.labels)
PROMETHEUS = Pod("prometheus", "monitoring", {"app.kubernetes.io/name": "prometheus"})
STRANGER = Pod("stranger", "elsewhere", {"app": "x"})
NEIGHBOUR = Pod("neighbour", NAMESPACE, {"app": "x"})
DNS = Pod("dns", "kube-system", {"k8s-app": "kube-dns"})
WORLD = Outside("world", "203.0.113.7")
SYNC_POD = Pod("sync", NAMESPACE, labels("docs", SYNC_COMPONENT))
OTHER_SYNC = Pod("other-sync", NAMESPACE, labels("other", SYNC_COMPONENT))
OTHERS: tuple[Peer, ...] = (OPERATOR, IMPOSTOR, STRANGER, NEIGHBOUR, DNS, WORLD, OTHER_SYNC)
READERS = ("gateway", "retriever", "engine-a", "engine-b")
SHARDS = ("cachestore", "shard")

INSIDE: set[tuple[str, str, int]] = {
    ("gateway", "retriever", 50051),
    ("gateway", "engine-a", 8000),
    ("gateway", "engine-a", 50051),
    ("gateway", "engine-b", 8000),
    ("gateway", "engine-b", 50051),
    *(("gateway", shard, 50051) for shard in SHARDS),
    *((f"engine-{e}", shard, port) for e in "ab" for shard in SHARDS for port in (50051, 50052)),
    # Shards exchange missed deletes and copies.
    *((one, other, p) for one, other in permutations(SHARDS, 2) for p in (50051, 50052)),
    ("sync", "gateway", 8001),
    ("operator", "gateway", 8001),
    ("operator", "retriever", 8081),
    ("operator", "engine-a", 8000),
    ("operator", "engine-b", 8000),
    *(("operator", shard, 8081) for shard in SHARDS),
}
"""Connections that every spec allows: (client, server, port)."""
DNS_EDGES = {(part, other.name, 53) for part in (*READERS, *SHARDS) for other in OTHERS}
"""A DNS resolver can be a pod, or a cache on the node."""


def pods_of(children: list[Object], name: str = "docs") -> list[Pod]:
    return [
        Pod(
            workload["metadata"]["name"].removeprefix(f"{name}-"),
            NAMESPACE,
            workload["spec"]["template"]["metadata"]["labels"],
        )
        for workload in workloads_of(children)
    ]


def edges(children: list[Object]) -> set[tuple[str, str, int]]:
    """Return every allowed connection as (source, target, port)."""
    policies = kinds_of(children, "NetworkPolicy")
    pods = pods_of(children)
    shards = [Pod("shard", pod.namespace, pod.labels) for pod in pods if pod.name == "cachestore"]
    ours = [*pods, *shards, SYNC_POD]
    everybody: list[Peer] = [*ours, *OTHERS]
    return {
        (source.name, target.name, port)
        for source, target, port in product(everybody, everybody, PORTS)
        # Our policies do not concern other pods, and no pod connects to itself.
        if source is not target and (source in ours or target in ours)
        if may_talk(policies, source, target, port)
    }


def expected(*also: set[tuple[str, str, int]]) -> set[tuple[str, str, int]]:
    # A sync pod may connect to any public server.
    sources = {("sync", WORLD.name, port) for port in PORTS}
    sources |= {("sync", other.name, 53) for other in OTHERS}
    return INSIDE.union(DNS_EDGES, sources, *also)


ADMINS = {("neighbour", "gateway", 8001), ("other-sync", "gateway", 8001)}
"""Pods of the namespace, which reach the second port by default."""
EVERYONE = {
    *((other.name, "gateway", 8000) for other in OTHERS),
    ("operator", "gateway", 8000),
    *ADMINS,
}
ENGINES = [{"name": "a"}, {"name": "b"}]


@pytest.mark.parametrize("address", ["169.254.169.254", "10.0.0.7", "fd00:ec2::254", "127.0.0.1"])
def test_a_sync_reaches_inside_addresses_only_if_the_operator_allows_some(address: str) -> None:
    inside = Outside("inside", address)
    policies = kinds_of(children_of(make_cache()), "NetworkPolicy")
    assert not may_talk(policies, SYNC_POD, inside, 80)
    assert may_talk(policies, SYNC_POD, WORLD, 443)
    placement = ClusterPlacement(make_cache(), "1", source_networks=("10.0.0.0/8",))
    opened = network_policy.build(make_cache(), placement)
    assert may_talk(opened, SYNC_POD, inside, 80)


def test_by_default_only_the_gateway_is_open_to_everyone() -> None:
    assert edges(build(engines=ENGINES)) == expected(EVERYONE)


def test_only_the_given_clients_may_connect_to_the_gateway() -> None:
    clients = [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}},
            "podSelector": {"matchLabels": {"app": "x"}},
        },
    ]
    open_ = edges(build(engines=ENGINES, networkPolicy={"clients": clients}))
    assert open_ == expected({("stranger", "gateway", 8000)}, ADMINS)


def test_a_pod_selector_alone_selects_in_the_own_namespace() -> None:
    clients = [{"podSelector": {"matchLabels": {"app": "x"}}}]
    open_ = edges(build(engines=ENGINES, networkPolicy={"clients": clients}))
    assert open_ == expected({("neighbour", "gateway", 8000)}, ADMINS)


def test_only_the_given_clients_may_connect_to_the_admin_port() -> None:
    clients = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}}]
    spec = {"clients": [{"podSelector": {}}], "adminClients": clients}
    found = edges(build(engines=ENGINES, networkPolicy=spec))
    assert ("stranger", "gateway", 8001) in found
    assert not {("neighbour", "gateway", 8001), ("stranger", "gateway", 8000)} & found


def test_components_that_read_models_may_connect_to_the_hub() -> None:
    open_ = edges(build(engines=ENGINES, model={"source": "hf:a/b"}))
    hub = {(part, other.name, 443) for part in READERS for other in OTHERS}
    # The addresses of the hub are unknown, so its port is open to every address.
    assert open_ == expected(EVERYONE, hub)


def embedder(url: str) -> Object:
    return {"embedder": {"source": url, "model": "e"}}


@pytest.mark.parametrize(
    ("url", "reached", "missed"),
    [
        ("http://203.0.113.7:80", (WORLD, 80), (WORLD, 443)),
        ("https://203.0.113.7", (WORLD, 443), (WORLD, 80)),
        ("http://vllm.elsewhere.svc:8000", (STRANGER, 22), (NEIGHBOUR, 22)),
    ],
)
def test_only_the_gateway_may_connect_to_an_engine_outside(
    url: str, reached: tuple[Peer, int], missed: tuple[Peer, int]
) -> None:
    children = build(engines=[{"name": "a"}, {"name": "theirs", "url": url}])
    policies = kinds_of(children, "NetworkPolicy")
    for pod in pods_of(children):
        assert may_talk(policies, pod, *reached) == (pod.name == "gateway")
        assert not may_talk(policies, pod, *missed)


@pytest.mark.parametrize(
    ("url", "reached", "missed"),
    [
        ("http://203.0.113.7/v1", (WORLD, 80), (STRANGER, 80)),
        ("http://203.0.113.7:443/v1", (WORLD, 443), (WORLD, 80)),
        ("https://api.example.com/v1", (WORLD, 443), (WORLD, 80)),
        # The pods of a Service may listen on any port.
        ("http://embeddings/v1", (NEIGHBOUR, 22), (STRANGER, 80)),
        ("http://embeddings.elsewhere.svc/v1", (STRANGER, 22), (NEIGHBOUR, 80)),
        ("http://embeddings.elsewhere.svc.cluster.local/v1", (STRANGER, 22), (WORLD, 80)),
        # Two labels are a Service and its namespace, or an external host.
        ("http://embeddings.elsewhere/v1", (STRANGER, 22), (NEIGHBOUR, 22)),
        ("https://example.com/v1", (WORLD, 443), (WORLD, 80)),
    ],
)
def test_only_the_retriever_may_connect_to_the_embedder(
    url: str, reached: tuple[Peer, int], missed: tuple[Peer, int]
) -> None:
    children = build(retriever=embedder(url))
    policies = kinds_of(children, "NetworkPolicy")
    for pod in pods_of(children):
        is_retriever = pod.name == "retriever"
        assert may_talk(policies, pod, *reached) == is_retriever
        assert not may_talk(policies, pod, *missed)


@pytest.mark.parametrize(
    "models",
    [
        {"embedder": {"source": "hf:intfloat/e5-small-v2"}},
        {"reranker": {"source": "cross-encoder", "model": "cross-encoder/ms-marco-MiniLM-L6-v2"}},
    ],
)
def test_only_the_retriever_may_connect_to_the_hub_for_its_models(models: Object) -> None:
    children = build(retriever=models)
    policies = kinds_of(children, "NetworkPolicy")
    for pod in pods_of(children):
        assert may_talk(policies, pod, WORLD, 443) == (pod.name == "retriever")
        assert not may_talk(policies, pod, WORLD, 80)


def test_an_embedder_with_an_ipv6_address() -> None:
    children = build(retriever=embedder("http://[2001:db8::7]:8080/v1"))
    policies = kinds_of(children, "NetworkPolicy")
    [retriever] = [pod for pod in pods_of(children) if pod.name == "retriever"]
    assert may_talk(policies, retriever, Outside("there", "2001:db8::7"), 8080)
    assert not may_talk(policies, retriever, Outside("beside", "2001:db8::8"), 8080)


def test_every_component_may_connect_to_the_collector() -> None:
    children = build(telemetry={"otlp": {"endpoint": "http://collector.elsewhere.svc:4318"}})
    policies = kinds_of(children, "NetworkPolicy")
    for pod in pods_of(children):
        # The pods of a Service may listen on any port.
        assert may_talk(policies, pod, STRANGER, 22)
        assert not may_talk(policies, pod, NEIGHBOUR, 22)
        assert not may_talk(policies, pod, WORLD, 4318)


def test_platforms_of_one_namespace_are_isolated() -> None:
    mine, theirs = build(engines=ENGINES), build("other", engines=ENGINES)
    policies = kinds_of([*mine, *theirs], "NetworkPolicy")
    ours, others = pods_of(mine), pods_of(theirs, "other")
    open_ = {
        (source.name, target.name, port)
        for source, target, port in product(ours, others, PORTS)
        if may_talk(policies, source, target, port)
    }
    assert open_ == set()


def test_without_policies_everything_is_open() -> None:
    assert kinds_of(build(networkPolicy={"enabled": False}), "NetworkPolicy") == []


@given(specs, capabilities)
def test_needed_connections_are_open_in_every_spec(spec: Object, served: Capabilities) -> None:
    children = children_of(make_cache(**spec), served)
    policies = kinds_of(children, "NetworkPolicy")
    pods = {pod.name: pod for pod in pods_of(children)}
    engines = [pod for name, pod in pods.items() if name.startswith("engine-")]
    gateway, retriever, store = pods["gateway"], pods["retriever"], pods["cachestore"]
    needed = [
        *((gateway, engine, port) for engine in engines for port in (8000, 50051)),
        *((engine, store, port) for engine in engines for port in (50051, 50052)),
        *((OPERATOR, engine, 8000) for engine in engines),
        *((gateway, retriever, 50051), (gateway, store, 50051), (SYNC_POD, gateway, 8001)),
        *((OPERATOR, gateway, 8001), (OPERATOR, retriever, 8081), (OPERATOR, store, 8081)),
    ]
    for source, target, port in needed:
        assert may_talk(policies, source, target, port)
    if policies:
        for pod in pods.values():
            assert not may_talk(policies, pod, STRANGER, 22)
            assert may_talk(policies, pod, DNS, 53, "UDP")
        for inner in (retriever, store, *engines):
            for port in PORTS:
                assert not may_talk(policies, STRANGER, inner, port)


def test_prometheus_reads_metrics_and_nothing_else() -> None:
    policies = kinds_of(build(), "NetworkPolicy")
    for component, port in (
        ("gateway", 9464),
        ("engine", 9464),
        ("retriever", 8081),
        ("cachestore", 8081),
    ):
        pod = Pod(component, NAMESPACE, labels("docs", component))
        assert may_talk(policies, PROMETHEUS, pod, port)
        assert not may_talk(policies, STRANGER, pod, port)
        others = set(PORTS) - {port} - ({8000} if component == "gateway" else set())
        assert not any(may_talk(policies, PROMETHEUS, pod, other) for other in others)


def test_the_spec_names_the_readers_of_metrics() -> None:
    reader = {"namespaceSelector": {"matchLabels": {"team": "x"}}}
    pod = Pod("engine", NAMESPACE, labels("docs", "engine"))
    named = kinds_of(build(networkPolicy={"metricsFrom": [reader]}), "NetworkPolicy")
    assert not may_talk(named, PROMETHEUS, pod, 9464)
    chosen = Pod("own", "x", {"app": "scraper"}, {"team": "x"})
    assert may_talk(named, chosen, pod, 9464)


def test_the_rule_of_the_prometheus_adapter_has_the_metric_of_autoscalers() -> None:
    values = yaml.safe_load(ADAPTER.read_text())
    [rule] = values["rules"]["custom"]
    bounds = {"replicas": 1, "autoscaling": {"maxReplicas": 4}}
    [autoscaler] = kinds_of(build(engines=[bounds]), "HorizontalPodAutoscaler")
    [metric] = autoscaler["spec"]["metrics"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    waiting, pending = yaml.safe_load(KEDA.read_text())["spec"]["triggers"]
    series = rule["seriesQuery"].partition("{")[0]
    assert series in waiting["metadata"]["query"]
    assert "ragcache_engine_pending_seconds{" in pending["metadata"]["query"]
    assert rule["resources"]["overrides"] == {
        "namespace": {"resource": "namespace"},
        "pod": {"resource": "pod"},
    }


def test_the_keda_example_scales_engines_whose_metrics_are_scraped() -> None:
    scaled = yaml.safe_load(KEDA.read_text())
    bounds = {"replicas": 1, "autoscaling": {"maxReplicas": 4}}
    cache = make_cache("quickstart", "default", engines=[{"name": "main", **bounds}])
    without_adapter = replace(Capabilities.latest(), custom_metrics=False)
    children = children_of(cache, without_adapter)
    [target] = [
        c
        for c in children
        if c["metadata"]["name"] == "quickstart-engine-main" and c["kind"] == "Deployment"
    ]
    assert scaled["spec"]["scaleTargetRef"]["name"] == target["metadata"]["name"]
    limits = scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]
    assert target["metadata"]["annotations"][REPLICA_RANGE] == "{}-{}".format(*limits)
    labels_ = target["spec"]["template"]["metadata"]["labels"]
    [monitor] = kinds_of(children, "PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels_.items()


def test_colocated_shards_are_reached_in_the_pods_of_engines() -> None:
    children = build(engines=ENGINES, cacheStore={"placement": "colocated"})
    policies = kinds_of(children, "NetworkPolicy")
    assert {one["metadata"]["name"] for one in policies} == {
        f"docs-{part}" for part in ("default-deny", "gateway", "retriever", "engine", "sync")
    }
    pods = {pod.name: pod for pod in pods_of(children)}
    assert pods.keys() == {"gateway", "retriever", "engine-a", "engine-b"}
    open_ = {
        (source.name, target.name, port)
        for source, target in permutations([*pods.values(), OPERATOR, PROMETHEUS, STRANGER], 2)
        for port in (50051, 50052, 50053, 8081, 9464)
        if target.name.startswith("engine-") and may_talk(policies, source, target, port)
    }
    assert open_ == {
        *(("gateway", f"engine-{one}", port) for one in "ab" for port in (50051, 50053)),
        *(("prometheus", f"engine-{one}", port) for one in "ab" for port in (8081, 9464)),
        *(("operator", f"engine-{one}", 8081) for one in "ab"),
        *((f"engine-{a}", f"engine-{b}", port) for a, b in ("ab", "ba") for port in (50052, 50053)),
    }
