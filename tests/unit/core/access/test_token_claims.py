"""What the claims of a token allow its caller."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core.access.caller import Caller, NotAllowed, Scope
from ragcache_core.access.key_file import parse_key_file
from ragcache_core.access.token_claims import TokenIssuer, caller_of
from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.filters import Exists, Filter

SCOPES = {Scope.ASK: ("asker",), Scope.WRITE: ("writer", "editor"), Scope.ADMIN: ("root",)}
LISTED = frozenset({"red", "blue"})


def read_filter(path: str, value: Any) -> Filter:
    if not isinstance(value, str):
        raise InvalidInput(path, "is no text", "write a text")
    return Exists(value)


def issuer(**changes: Any) -> TokenIssuer:
    return TokenIssuer("id", "https://id.example.com", ("ragcache",), SCOPES, **changes)


def caller(rules: TokenIssuer, **claims: Any) -> Caller:
    return caller_of(rules, {"sub": "jane", **claims}, LISTED, read_filter)


def test_a_caller_is_named_after_the_issuer_and_no_key_can_be_called_so() -> None:
    found = caller(issuer(), roles=["asker"])
    assert found == Caller("id:jane", scopes=frozenset({Scope.ASK}))
    entry = f'[[keys]]\nname = "id:jane"\nhash = "sha256:{"0" * 64}"\nscopes = ["ask"]'
    with pytest.raises(InvalidInput, match="is no name"):
        parse_key_file(entry.encode(), read_filter)


@pytest.mark.parametrize(
    ("claim", "claims", "wanted"),
    [
        ("roles", {"roles": ["asker", "editor"]}, {Scope.ASK, Scope.WRITE}),
        ("roles", {"roles": "root"}, {Scope.ADMIN}),
        ("scope", {"scope": "openid asker writer"}, {Scope.ASK, Scope.WRITE}),
        ("realm_access.roles", {"realm_access": {"roles": ["asker"]}}, {Scope.ASK}),
        ("https://e/roles", {"https://e/roles": ["asker"]}, {Scope.ASK}),
        ("a.b", {"a.b": ["asker"], "a": {"b": ["root"]}}, {Scope.ASK}),
        ("roles", {}, set()),
        ("roles", {"roles": ["no asker", "ROOT", 7, None, ["root"]]}, set()),
        ("roles", {"roles": {"root": True}}, set()),
        ("a.b.c", {"a": ["b"]}, set()),
    ],
)
def test_scopes_come_from_values_of_a_claim(
    claim: str, claims: dict[str, Any], wanted: set[Scope]
) -> None:
    assert caller(issuer(scopes_claim=claim), **claims).scopes == wanted


def test_every_token_has_the_default_scopes() -> None:
    rules = issuer(default_scopes=(Scope.ASK,))
    assert caller(rules).scopes == {Scope.ASK}
    assert caller(rules, roles=["writer"]).scopes == {Scope.ASK, Scope.WRITE}


@pytest.mark.parametrize(
    ("tenants", "value", "wanted"),
    [
        ({}, "red", "red"),
        ({}, ["unknown", "blue"], "blue"),
        ({"/teams/red": "crimson"}, ["/all", "/teams/red"], "crimson"),
        ({"a": "red", "b": "red"}, ["a", "b"], "red"),
    ],
)
def test_a_tenant_is_a_listed_one(tenants: dict[str, str], value: Any, wanted: str) -> None:
    rules = issuer(tenant_claim="org", tenants=tenants)
    assert caller(rules, org=value).tenant == wanted
    assert wanted in rules.tenants_among(LISTED)


@pytest.mark.parametrize("value", [None, "green", "red ", ["red", "blue"], [], {"red": 1}, 7])
def test_a_token_without_a_listed_tenant_is_refused(value: Any) -> None:
    with pytest.raises(NotAllowed, match="'org' names"):
        caller(issuer(tenant_claim="org"), org=value)
    with pytest.raises(NotAllowed, match="'org' names no tenant"):
        # With a table of values, tenants of the key file are none of this issuer's.
        caller(issuer(tenant_claim="org", tenants={"/teams/red": "red"}), org="red")


def test_tokens_without_a_claim_for_it_have_no_tenant() -> None:
    assert caller(issuer(), org="red").tenant is None
    assert issuer().tenants_among(LISTED) == frozenset()


LIMITS = {"collections_claim": "c", "filter_claim": "f"}


def test_collections_and_the_filter_come_from_claims() -> None:
    found = caller(issuer(**LIMITS), roles=["asker"], c=["team-*", "all"], f="public")
    assert found.collections == ("team-*", "all")
    assert found.filter == Exists("public")
    writer = caller(issuer(**LIMITS), roles=["writer"], c="team-*")
    assert (writer.collections, writer.filter) == (("team-*",), None)
    admin = caller(issuer(**LIMITS), roles=["root"])
    assert (admin.collections, admin.filter) == ((), None)


@pytest.mark.parametrize(
    ("roles", "claims", "problem"),
    [
        (["asker"], {"f": "public"}, "'c' is missing"),
        (["asker"], {"c": [], "f": "public"}, "'c' names no collections"),
        (["asker"], {"c": [7], "f": "public"}, "'c' names no collections"),
        (["asker"], {"c": "a"}, "'f' is missing"),
        (["asker"], {"c": "a", "f": 7}, "'f' is no filter"),
        (["writer"], {"c": "a", "f": "public"}, "'f' has no effect"),
        (["root"], {"c": "a"}, "'c' has no effect"),
        ([], {}, "'c' is missing"),
    ],
)
def test_a_limit_is_never_left_out(roles: list[str], claims: dict[str, Any], problem: str) -> None:
    with pytest.raises(NotAllowed, match=problem):
        caller(issuer(**LIMITS), roles=roles, **claims)


@pytest.mark.parametrize("name", [None, "", 7, ["jane"], "a\nb", "a\0b", "a" * 256])
def test_a_user_needs_a_name(name: Any) -> None:
    with pytest.raises(NotAllowed, match="'sub'"):
        caller(issuer(), sub=name)
    assert caller(issuer(name_claim="email"), sub=name, email="j@e").name == "id:j@e"
