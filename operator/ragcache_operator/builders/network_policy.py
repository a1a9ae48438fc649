"""NetworkPolicies: they deny all connections of a RagCache's pods except those of one table.

A policy sees the port of the pod and not of its Service, so all ports here are pod ports.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from ragcache_operator.builders.cachestore import COLOCATED_GRPC, is_colocated
from ragcache_operator.builders.metadata import (
    OPERATOR_POD_LABELS,
    SYNC_COMPONENT,
    Object,
    component_selector,
    instance_selector,
    labels,
    object_name,
)
from ragcache_operator.builders.placement import PORT_NUMBERS, PlatformPlacement
from ragcache_operator.builders.shared_environment import proxy_urls
from ragcache_operator.spec.cluster import ClientSpec
from ragcache_operator.spec.ragcache import COMPONENTS, RagCache
from ragcache_operator.spec.retriever import RetrieverSpec

_BOTH: Final = ["Ingress", "Egress"]

_EDGES: Final = (
    ("gateway", "retriever", "grpc"),
    ("gateway", "engine", "http"),
    ("gateway", "engine", "grpc"),
    ("gateway", "cachestore", "grpc"),
    ("engine", "cachestore", "grpc"),
    ("engine", "cachestore", "data"),
    ("cachestore", "cachestore", "grpc"),
    ("cachestore", "cachestore", "data"),
    (SYNC_COMPONENT, "gateway", "admin"),
)
"""Allowed connections between components: (client, server, port name)."""
_MOVED: Final = {"cachestore": "engine"}
"""In whose pods colocated shards are."""

_OPERATOR_TARGETS: Final = (
    ("gateway", "admin"),
    ("retriever", "health"),
    ("engine", "http"),
    ("cachestore", "health"),
)
"""Endpoints that the operator calls, for the self-test, for health and for status."""

_METRICS_PORTS: Final = {
    "gateway": "metrics",
    "retriever": "health",
    "engine": "metrics",
    "cachestore": "health",
}
"""Ports that serve metrics, and no more than health besides."""

_PROMETHEUS: Final[Object] = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}
"""Pods of Prometheus, as the Prometheus Operator and the community's chart label them."""

_READS_MODEL: Final = ("gateway", "retriever", "engine")
"""Components that download a model of the hub."""
_DNS_PORTS: Final = (53, 5353)
"""OpenShift's DNS pods use the second port. The rule allows any address, because a node-local DNS
cache is not a pod."""
_DNS: Final = [
    {"port": port, "protocol": protocol} for port in _DNS_PORTS for protocol in ("UDP", "TCP")
]
_PUBLIC: Final = {
    "0.0.0.0/0": (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32"),
        *("169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15"),
        *("224.0.0.0/4", "240.0.0.0/4"),
    ),
    # Mapped addresses (::ffff:0:0/96) are sent as IPv4, and the API server refuses their block.
    "::/0": ("::/96", "64:ff9b::/96", "2002::/16", "fc00::/7", "fe80::/10"),
}
"""All addresses, and the blocks in them that are closed to sources of collections."""
_HTTPS: Final = 443
_BACKEND_PORTS: Final = {"postgres": (5432,), "milvus": (19530,)}
"""Usual ports of the backends."""


def build(cache: RagCache, placement: PlatformPlacement) -> list[Object]:
    """Return all policies of a RagCache, or none if its spec disables them."""
    if not cache.spec.network_policy.enabled:
        return []
    name = cache.metadata.name
    deny = {"podSelector": {"matchLabels": instance_selector(name)}, "policyTypes": _BOTH}
    return [
        _policy(cache, "default-deny", None, deny),
        *(
            _component_policy(cache, component, placement)
            for component in COMPONENTS
            if not (is_colocated(cache, placement) and component in _MOVED)
        ),
        _policy(
            cache,
            SYNC_COMPONENT,
            SYNC_COMPONENT,
            {
                "podSelector": {"matchLabels": component_selector(name, SYNC_COMPONENT)},
                "policyTypes": _BOTH,
                "egress": _sync_egress(cache, placement),
            },
        ),
    ]


def _sync_egress(cache: RagCache, placement: PlatformPlacement) -> list[Object]:
    """Return the rules of syncs: public addresses, DNS, the gateway and proxies.

    A sync checks addresses itself, also with a network plugin that enforces no policy. Plugins
    differ in whether a block of addresses matches pods, so an allowed network leaves all open.
    """
    if placement.source_networks:
        return [{}]
    blocks = [
        {"ipBlock": {"cidr": cidr, "except": list(closed)}} for cidr, closed in _PUBLIC.items()
    ]
    return [
        {"ports": _DNS},
        {"to": [_pods_of(cache.metadata.name, "gateway")], "ports": _ports(PORT_NUMBERS["admin"])},
        {"to": blocks},
        *(rule for url in proxy_urls(cache) for rule in _to_url(url, placement)),
    ]


def _policy(cache: RagCache, name: str, component: str | None, spec: Object) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": object_name(cache, name),
            "namespace": cache.metadata.namespace,
            "labels": labels(cache.metadata.name, component),
        },
        "spec": spec,
    }


def _component_policy(cache: RagCache, component: str, placement: PlatformPlacement) -> Object:
    spec: Object = {
        "podSelector": {"matchLabels": component_selector(cache.metadata.name, component)},
        "policyTypes": _BOTH,
        "ingress": _ingress(cache, component, placement),
        "egress": _egress(cache, component, placement),
    }
    return _policy(cache, component, component, spec)


def _ingress(cache: RagCache, component: str, placement: PlatformPlacement) -> list[Object]:
    rules = _client_rules(cache, component, placement)
    readers = _peers(cache.spec.network_policy.metrics_from) or [_PROMETHEUS]
    ports = [PORT_NUMBERS[_METRICS_PORTS[one]] for one in _in_pods_of(cache, component, placement)]
    rules.append({"from": readers, "ports": _ports(*ports)})
    return rules


def _in_pods_of(cache: RagCache, component: str, placement: PlatformPlacement) -> list[str]:
    """Return the components that run in the pods of a component, itself first."""
    if not is_colocated(cache, placement):
        return [component]
    return [component, *(moved for moved, host in _MOVED.items() if host == component)]


def _edges(cache: RagCache, placement: PlatformPlacement) -> list[tuple[str, str, str]]:
    """Return the allowed connections between pods: (client, server, port name)."""
    if not is_colocated(cache, placement):
        return list(_EDGES)
    moved = (
        (_MOVED.get(source, source), _MOVED.get(target, target), _pod_port(target, port))
        for source, target, port in _EDGES
    )
    return list(dict.fromkeys(moved))


def _pod_port(component: str, port: str) -> str:
    """Return the name of a component's port in pods where colocated shards are."""
    return COLOCATED_GRPC if (component, port) == ("cachestore", "grpc") else port


def _client_rules(cache: RagCache, component: str, placement: PlatformPlacement) -> list[Object]:
    name = cache.metadata.name
    rules = [
        {"from": [_pods_of(name, source)], "ports": _ports(PORT_NUMBERS[port])}
        for source, target, port in _edges(cache, placement)
        if target == component
    ]
    components = _in_pods_of(cache, component, placement)
    ports = [PORT_NUMBERS[port] for target, port in _OPERATOR_TARGETS if target in components]
    rules.append({"from": [_operator(placement)], "ports": _ports(*ports)})
    if component == "gateway":
        policy = cache.spec.network_policy
        anyone = {"from": _peers(policy.clients)} if policy.clients else {}
        rules.append({**anyone, "ports": _ports(PORT_NUMBERS["http"])})
        admins = _peers(policy.admin_clients) or [{"podSelector": {}}]
        rules.append({"from": admins, "ports": _ports(PORT_NUMBERS["admin"])})
    return rules


def _peers(clients: Sequence[ClientSpec]) -> list[Object]:
    return [
        client.model_dump(by_alias=True, exclude_defaults=True, mode="json") for client in clients
    ]


def _egress(cache: RagCache, component: str, placement: PlatformPlacement) -> list[Object]:
    name = cache.metadata.name
    rules: list[Object] = [{"ports": _DNS}]
    rules += [
        {"to": [_pods_of(name, target)], "ports": _ports(PORT_NUMBERS[port])}
        for source, target, port in _edges(cache, placement)
        if source == component
    ]
    models = (cache.spec.model,) if component == "retriever" else cache.spec.models
    from_hub = any(model.parsed_source.kind == "hf" for model in models)
    if component in _READS_MODEL and from_hub:
        rules.append({"ports": _ports(_HTTPS)})
    if component == "retriever":
        rules += _retriever_egress(cache.spec.retriever, placement)
    if component == "gateway":
        urls = [engine.url for engine in cache.spec.engines if engine.url is not None]
        issuers = cache.spec.gateway.oidc
        urls += [url for one in issuers for url in (one.issuer, one.jwks_url) if url is not None]
        rules += [rule for url in urls for rule in _to_url(url, placement)]
    if component != "cachestore" or cache.spec.telemetry.otlp is not None:
        rules += [rule for url in proxy_urls(cache) for rule in _to_url(url, placement)]
    otlp = cache.spec.telemetry.otlp
    if otlp is not None:
        rules += _to_url(otlp.endpoint, placement)
    return rules


def _retriever_egress(retriever: RetrieverSpec, placement: PlatformPlacement) -> list[Object]:
    rules: list[Object] = []
    if retriever.embedder.is_endpoint:
        rules += _to_url(retriever.embedder.source, placement)
    if retriever.embedder.hub_name or retriever.reranker.hub_name:
        rules.append({"ports": _ports(_HTTPS)})
    if retriever.reranker.source.startswith("http"):
        rules += _to_url(retriever.reranker.source, placement)
    if retriever.backend.kind != "embedded":
        # The address is in a Secret, which the operator does not read.
        rules.append({"ports": _ports(*_BACKEND_PORTS[retriever.backend.kind])})
    return rules


def _ports(*numbers: int) -> list[Object]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


def _pods_of(cache_name: str, component: str) -> Object:
    return {"podSelector": {"matchLabels": component_selector(cache_name, component)}}


def _operator(placement: PlatformPlacement) -> Object:
    namespace = _namespace(placement.operator_namespace)
    return {
        "namespaceSelector": namespace,
        "podSelector": {"matchLabels": dict(OPERATOR_POD_LABELS)},
    }


def _namespace(name: str | None) -> Object:
    """Return the selector of a namespace, or of all namespaces if its name is unknown."""
    if name is None:
        return {}
    return {"matchLabels": {"kubernetes.io/metadata.name": name}}


def _to_url(url: str, placement: PlatformPlacement) -> list[Object]:
    """Return the egress rules for a URL.

    Policies match addresses and pods, not host names. The pods of a Service may listen on other
    ports than the Service.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _to_name(host.rstrip(".").split("."), port, placement)
    block = {"cidr": f"{address}/{address.max_prefixlen}"}
    return [{"to": [{"ipBlock": block}], "ports": _ports(port)}]


def _to_name(labels: Sequence[str], port: int, placement: PlatformPlacement) -> list[Object]:
    """Return the rules for a host name, given as its DNS labels.

    It is ``service``, ``service.namespace(.svc...)`` or a name outside the cluster.
    """
    if len(labels) == 1:
        return [{"to": [{"podSelector": {}}]}]
    service = {"to": [{"namespaceSelector": _namespace(labels[1])}]}
    if labels[2:3] == ["svc"]:
        return [service]
    # A name of two labels can be a Service or an external host.
    external = {"ports": _ports(port)}
    return [service, external] if len(labels) == 2 else [external]
