"""The certificate that a gateway shows to clients, by spec.gateway.tls."""

from __future__ import annotations

from typing import Any

from ragcache_operator.builders.placement import ClusterPlacement
from tests.kit.operator import build, container_of, env_of, make_cache, pod_of

GATEWAY: dict[str, Any] = {"tls": {"secretName": "rag-example-com"}, "service": {}}


def test_without_the_field_both_ports_serve_plain_http() -> None:
    children = build(gateway={"service": {}})
    assert "RAGCACHE_SERVER_TLS_DIR" not in env_of(children, "gateway")
    assert scheme_of(children) == {"HTTP"}
    for service in services(children):
        assert all("appProtocol" not in port for port in service["spec"]["ports"])
    assert ClusterPlacement(make_cache(), "1").admin_url.startswith("http://")


def test_pods_read_the_certificate_and_its_key_from_the_secret() -> None:
    children = build(gateway=GATEWAY)
    folder = env_of(children, "gateway")["RAGCACHE_SERVER_TLS_DIR"]
    mounts = {one["name"]: one for one in container_of(children, "gateway")["volumeMounts"]}
    assert mounts["gateway-tls"] == {
        "name": "gateway-tls",
        "mountPath": folder,  # no subPath: the kubelet would never change the files
        "readOnly": True,
    }
    volumes = {one["name"]: one for one in pod_of(children, "gateway")["volumes"]}
    volume = volumes["gateway-tls"]["secret"]
    assert volume["secretName"] == "rag-example-com"
    assert {one["key"] for one in volume["items"]} == {"tls.crt", "tls.key"}
    for other in ("retriever", "cachestore", "engine-main"):
        assert "gateway-tls" not in {one["name"] for one in pod_of(children, other)["volumes"]}


def test_probes_services_and_addresses_are_https() -> None:
    children = build(gateway=GATEWAY)
    assert scheme_of(children) == {"HTTPS"}
    assert len(services(children)) == 2
    for service in services(children):
        assert {port["appProtocol"] for port in service["spec"]["ports"]} == {"https"}
    placement = ClusterPlacement(make_cache(gateway=GATEWAY), "1")
    assert placement.gateway_url.startswith("https://")
    assert placement.admin_url.startswith("https://")


def services(children: list[Any]) -> list[Any]:
    names = ("docs-gateway", "docs-gateway-external")
    return [
        child
        for child in children
        if child["kind"] == "Service" and child["metadata"]["name"] in names
    ]


def scheme_of(children: list[Any]) -> set[str]:
    container = container_of(children, "gateway")
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    return {container[probe]["httpGet"]["scheme"] for probe in probes}
