"""Services, and the Ingress and HTTPRoute that expose the gateway outside the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ragcache_operator.builders.metadata import Object
from ragcache_operator.spec.ragcache import GatewayServiceSpec, HTTPRouteSpec, IngressSpec

Addressing = Mapping[str, str | bool]

_HTTPS: Final = {"appProtocol": "https"}
"""How meshes and controllers learn what a port serves."""

HEADLESS: Final[Addressing] = {"clusterIP": "None"}
"""The name resolves to every ready pod, and the client balances between them."""
HEADLESS_ALL_PODS: Final[Addressing] = {**HEADLESS, "publishNotReadyAddresses": True}
"""Headless, and the name also resolves to pods that are not ready."""


def service(
    metadata: Object,
    selector: Mapping[str, str],
    ports: Sequence[tuple[str, int]],
    addressing: Addressing | None = None,
    *,
    is_tls: bool = False,
) -> Object:
    """Return a Service for the selected pods.

    Args:
        ports: (name of the container's port, port number of the Service).
        addressing: HEADLESS or HEADLESS_ALL_PODS. By default the Service has one address.
        is_tls: Whether the ports serve HTTPS.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": "ClusterIP",
            **(addressing or {}),
            "selector": dict(selector),
            "ports": [
                {
                    **{"name": name, "port": number, "targetPort": name, "protocol": "TCP"},
                    **(_HTTPS if is_tls else {}),
                }
                for name, number in ports
            ],
        },
    }


def external_service(
    metadata: Object,
    selector: Mapping[str, str],
    given: GatewayServiceSpec,
    port: int,
    *,
    is_tls: bool,
) -> Object:
    """Return the Service that exposes the port for questions outside the cluster, and no other."""
    exposed: Object = {"name": "http", "port": port, "targetPort": "http", "protocol": "TCP"}
    if is_tls:
        exposed |= _HTTPS
    if given.node_port is not None:
        exposed["nodePort"] = given.node_port
    optional = {
        "loadBalancerClass": given.load_balancer_class,
        "loadBalancerSourceRanges": list(given.load_balancer_source_ranges),
    }
    named = {**metadata, "name": f"{metadata['name']}-external"}
    if given.annotations:
        named["annotations"] = dict(given.annotations)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": named,
        "spec": {
            "type": given.type,
            "externalTrafficPolicy": given.external_traffic_policy,
            **{field: value for field, value in optional.items() if value},
            "selector": dict(selector),
            "ports": [exposed],
        },
    }


def ingress(metadata: Object, given: IngressSpec, port_name: str) -> Object:
    """Return an Ingress for a port of the Service of the same name."""
    service = {"name": metadata["name"], "port": {"name": port_name}}
    path = {"path": "/", "pathType": "Prefix", "backend": {"service": service}}
    spec: Object = {"rules": [{"host": given.host, "http": {"paths": [path]}}]}
    if given.class_name is not None:
        spec["ingressClassName"] = given.class_name
    if given.tls_secret is not None:
        spec["tls"] = [{"hosts": [given.host], "secretName": given.tls_secret}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": metadata,
        "spec": spec,
    }


def http_route(metadata: Object, given: HTTPRouteSpec, port: int) -> Object:
    """Return an HTTPRoute for a port number of the Service of the same name."""
    parent = {"name": given.gateway}
    if given.gateway_namespace is not None:
        parent["namespace"] = given.gateway_namespace
    spec: Object = {
        "parentRefs": [parent],
        "rules": [{"backendRefs": [{"name": metadata["name"], "port": port}]}],
    }
    if given.hostnames:
        spec["hostnames"] = list(given.hostnames)
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": metadata,
        "spec": spec,
    }
