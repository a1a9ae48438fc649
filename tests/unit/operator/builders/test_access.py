"""API keys and ports in the objects of a RagCache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.caller import Scope
from ragcache_core.access.key_file import (
    KeyTable,
    builtin_table,
    collection_caller,
    parse_key_file,
)
from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.filters import Filter
from ragcache_gateway.auth.api_keys import signature_check
from ragcache_operator.builders import build_children
from ragcache_operator.builders.keys import (
    OPERATOR,
    SYNC_KEY_PERIOD_S,
    ComponentKeys,
    api_key_secret,
    api_key_secret_name,
)
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.collections.job import SYNC_TIMEOUT_S
from ragcache_wire.settings import GatewaySettings
from tests.kit.operator import (
    NAMESPACE,
    UID,
    Object,
    build,
    env_of,
    make_cache,
    pod_of,
)

KEYS = ComponentKeys(bytes(range(32)))
OWN = {"auth": {"secretRef": {"name": "team-keys", "key": "file"}}}
OFF = {"auth": {"enabled": False}}
NOW_S = 1_764_000_000.0


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


def test_the_gateway_accepts_the_operators_own_keys() -> None:
    cache = make_cache()
    env = env_of(build_children(cache, site_of(cache)), "gateway")
    hashes = dict(part.split("=", 1) for part in env["RAGCACHE_BUILTIN_KEYS"].split(","))
    del hashes["sync"]
    assert builtin_table(hashes).find(KEYS.key(OPERATOR, UID)) is not None


def test_a_secret_of_the_team_replaces_the_generated_one() -> None:
    cache = make_cache(gateway=OWN)
    assert api_key_secret_name(cache, site_of(cache)) is None


def test_only_an_explicit_false_opens_the_gateway() -> None:
    for spec, has_keys in (({}, True), ({"auth": {}}, True), (OWN, True), (OFF, False)):
        children = build(gateway=spec)
        assert ("RAGCACHE_API_KEYS_FILE" in env_of(children, "gateway")) == has_keys
        assert (key_volume(children) is not None) == has_keys


def test_the_gateway_gets_the_issuers_and_the_networks_that_the_administrator_opened() -> None:
    given = {
        "name": "id",
        "issuer": "https://id.example.com/realms/docs",
        "audiences": ["docs"],
        "scopes": {"ask": ["reader"], "admin": ["root"]},
        "tenantClaim": "groups",
        "tenants": {"/teams/red": "red"},
    }
    cache = make_cache(gateway={"oidc": [given]}, tls={"enabled": False})
    for networks, shown in (((), None), (("10.2.0.0/16", "fd12::/16"), "10.2.0.0/16,fd12::/16")):
        placement = replace(site_of(cache), issuer_networks=networks)
        env = env_of(build_children(cache, placement), "gateway")
        assert env.get("RAGCACHE_ISSUER_NETWORKS") == shown
    start = "RAGCACHE_"
    files = {f"{start}{part}" for part in ("SIGNING_KEY_FILE", "STORE_KEY_FILE", "TLS_DIR")}
    given_by_env: dict[str, Any] = {
        name.removeprefix(start).lower(): value
        for name, value in env.items()
        if name.startswith(start) and name not in files
    }
    settings = GatewaySettings(**given_by_env)
    assert settings.oidc == (cache.spec.gateway.oidc[0].rules,)
    assert settings.oidc[0].scopes[Scope.ADMIN] == ("root",)
    assert settings.oidc[0].tenants == {"/teams/red": "red"}
    assert list(map(str, settings.issuer_networks)) == ["10.2.0.0/16", "fd12::/16"]


@given(first=st.text(max_size=40), second=st.text(max_size=40))
def test_each_ragcache_has_keys_of_its_own(first: str, second: str) -> None:
    keys = {KEYS.key(OPERATOR, uid) for uid in (first, second)}
    assert len(keys) == (1 if first == second else 2)
    signed = {KEYS.collection_key("faq", uid, NOW_S) for uid in (first, second)}
    assert len(signed) == len(keys)


def test_the_gateway_accepts_a_key_of_its_ragcaches_collection() -> None:
    hashes = dict(part.split("=", 1) for part in KEYS.hashes(UID).split(","))
    check = signature_check(hashes["sync"])
    caller = collection_caller(KEYS.collection_key("faq", UID, NOW_S), check, NOW_S)
    assert caller is not None
    assert caller.collections == ("faq",)
    assert collection_caller(KEYS.collection_key("faq", "other", NOW_S), check, NOW_S) is None
    with pytest.raises(InvalidInput, match="no public key"):
        signature_check(hashes["sync"].replace("ed25519", "sha256"))


@given(st.integers(0, 10**10))
def test_a_key_of_syncs_is_valid_for_one_to_two_periods(now_s: int) -> None:
    check = signature_check(dict(one.split("=", 1) for one in KEYS.hashes(UID).split(","))["sync"])
    key = KEYS.collection_key("faq", UID, now_s)
    assert collection_caller(key, check, now_s + SYNC_KEY_PERIOD_S) is not None
    assert collection_caller(key, check, now_s + 2 * SYNC_KEY_PERIOD_S) is None
    assert SYNC_TIMEOUT_S < SYNC_KEY_PERIOD_S, "a key outlives the Job that has it"


def test_a_root_key_is_long_and_never_shown() -> None:
    assert "root" not in repr(KEYS)
    with pytest.raises(ValueError, match="root key"):
        ComponentKeys(b"short")
