"""API keys and ports in the objects of a RagCache."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.caller import Scope
from ragcache_core.access.key_file import KeyTable, builtin_table, parse_key_file
from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.filters import Filter
from ragcache_operator.builders import build_children
from ragcache_operator.builders.keys import (
    OPERATOR,
    SYNC,
    ComponentKeys,
    api_key_secret,
    api_key_secret_name,
    sync_secret,
    sync_variable,
)
from ragcache_operator.builders.placement import ClusterPlacement
from tests.kit.operator import (
    NAMESPACE,
    UID,
    Object,
    build,
    container_of,
    env_of,
    kinds_of,
    make_cache,
    of,
    pod_of,
)

KEYS = ComponentKeys(bytes(range(32)))
OWN = {"auth": {"secretRef": {"name": "team-keys", "key": "file"}}}
OFF = {"auth": {"enabled": False}}


def site_of(cache: Any, uid: str = UID) -> ClusterPlacement:
    return ClusterPlacement(cache, tag="1", owner=uid, component_keys=KEYS.hashes(uid))


def no_filter(path: str, value: Any) -> Filter:
    raise InvalidInput(path, "is a filter", "write none")


def parsed(content: str) -> KeyTable:
    return parse_key_file(content.encode(), no_filter)


def key_volume(children: list[Object]) -> Object | None:
    found = [v for v in pod_of(children, "gateway")["volumes"] if v["name"] == "api-keys"]
    return found[0]["secret"] if found else None


def test_the_generated_secret_has_a_key_and_a_file_that_accepts_it() -> None:
    cache = make_cache()
    site = site_of(cache)
    name = api_key_secret_name(cache, site)
    assert name is not None
    made = api_key_secret(cache, site, name, bytes(range(32)))
    entries = made["stringData"]
    caller = parsed(entries["keys.toml"]).find(entries["admin-key"])
    assert caller is not None
    assert caller.may(Scope.ADMIN)
    assert entries["admin-key"] not in entries["keys.toml"]
    [owner] = made["metadata"]["ownerReferences"]
    assert (owner["uid"], made["metadata"]["namespace"]) == (UID, NAMESPACE)


def test_the_gateway_mounts_the_file_alone_and_not_the_key() -> None:
    cache = make_cache()
    children = build_children(cache, site_of(cache))
    volume = key_volume(children)
    assert volume is not None
    assert volume["secretName"] == api_key_secret_name(cache, site_of(cache))
    assert volume["items"] == [{"key": "keys.toml", "path": "keys.toml"}]
    env = env_of(children, "gateway")
    assert env["RAGCACHE_API_KEYS_FILE"] == "/etc/ragcache/api-keys/keys.toml"
    hashes = dict(part.split("=", 1) for part in env["RAGCACHE_BUILTIN_KEYS"].split(","))
    assert builtin_table(hashes).find(KEYS.key(OPERATOR, UID)) is not None


def test_a_secret_of_the_team_replaces_the_generated_one() -> None:
    cache = make_cache(gateway=OWN)
    assert api_key_secret_name(cache, site_of(cache)) is None
    volume = key_volume(build(gateway=OWN))
    assert volume is not None
    assert volume["secretName"] == "team-keys"
    assert volume["items"] == [{"key": "file", "path": "keys.toml"}]


def test_only_an_explicit_false_opens_the_gateway() -> None:
    for spec, has_keys in (({}, True), ({"auth": {}}, True), (OWN, True), (OFF, False)):
        # Without speculation, only keys give questions priorities.
        children = build(gateway={**spec, "speculation": "off"})
        assert ("RAGCACHE_API_KEYS_FILE" in env_of(children, "gateway")) == has_keys
        assert (key_volume(children) is not None) == has_keys
        arguments = container_of(children, "engine-main")["args"]
        assert ("--scheduling-policy" in arguments) == has_keys


def test_ingress_and_http_route_reach_the_first_port_alone() -> None:
    ingress = of(build(gateway={"ingress": {"host": "a.example"}}), "Ingress", "docs-gateway")
    [rule] = ingress["spec"]["rules"]
    [path] = rule["http"]["paths"]
    assert path["backend"]["service"]["port"] == {"name": "http"}
    children = build(gateway={"port": 80, "httpRoute": {"gateway": "g"}})
    [route] = kinds_of(children, "HTTPRoute")
    assert [b["port"] for r in route["spec"]["rules"] for b in r["backendRefs"]] == [80]


def test_probes_use_the_port_that_clients_cannot_fill() -> None:
    container = container_of(build(), "gateway")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000, "admin": 8001, "metrics": 9464}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == ports["admin"]
    env = env_of(build(), "gateway")
    assert (env["RAGCACHE_LISTEN"], env["RAGCACHE_ADMIN_LISTEN"]) == (
        "0.0.0.0:8000",
        "0.0.0.0:8001",
    )


def test_limits_are_in_a_file_that_the_gateway_mounts() -> None:
    children = build(gateway={"limits": {"questions": 7}})
    content = of(children, "ConfigMap", "docs-gateway-limits")["data"]["limits.json"]
    assert json.loads(content)["questions"] == 7
    assert env_of(children, "gateway")["RAGCACHE_LIMITS_FILE"] == "/etc/ragcache/limits/limits.json"
    volumes = pod_of(children, "gateway")["volumes"]
    assert {"name": "limits", "configMap": {"name": "docs-gateway-limits"}} in volumes


@given(first=st.text(max_size=40), second=st.text(max_size=40))
def test_each_ragcache_and_each_client_has_a_key_of_its_own(first: str, second: str) -> None:
    keys = {KEYS.key(client, uid) for client in (OPERATOR, SYNC) for uid in (first, second)}
    assert len(keys) == (2 if first == second else 4)


def test_a_sync_gets_its_key_from_a_secret_named_by_the_key() -> None:
    cache = make_cache()
    site = site_of(cache)
    made = sync_secret(cache, site, KEYS)
    variable = sync_variable(cache, site, KEYS)
    reference = variable["valueFrom"]["secretKeyRef"]
    assert made["metadata"]["name"] == reference["name"]
    key = made["stringData"][reference["key"]]
    hashes = dict(part.split("=", 1) for part in KEYS.hashes(UID).split(","))
    caller = builtin_table(hashes).find(key)
    assert caller is not None
    assert caller.scopes == {Scope.WRITE}
    rotated = sync_secret(cache, site, ComponentKeys(bytes(32)))
    assert rotated["metadata"]["name"] != made["metadata"]["name"]


def test_a_root_key_is_long_and_never_shown() -> None:
    assert "root" not in repr(KEYS)
    with pytest.raises(ValueError, match="root key"):
        ComponentKeys(b"short")
