"""Ingress and HTTPRoute, which expose the gateway outside the cluster."""

from __future__ import annotations

from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.spec import HTTPRouteSpec, IngressSpec


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
