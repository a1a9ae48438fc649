"""The file of API keys, and what it lets callers do."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.caller import (
    ANYONE,
    MAX_NAMED_TENANTS,
    NO_TENANT,
    OTHER_TENANTS,
    Caller,
    NotAllowed,
    Scope,
    TenantRules,
)
from ragcache_core.access.key_file import (
    KeyTable,
    builtin_table,
    collection_caller,
    collection_key,
    entry_text,
    hash_text,
    key_of,
    parse_key_file,
)
from ragcache_core.access.quota import QuotaLimit, QuotaResource
from ragcache_core.access.usage import Period
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import PUBLIC_DOMAIN
from ragcache_core.retrieval.filters import And, Filter, In

KEY = key_of(bytes(range(32)))
APP = Caller("app", scopes=frozenset({Scope.ASK}))
OTHER = key_of(bytes(range(1, 33)))
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
SCOPES = st.sets(st.sampled_from(list(Scope)), min_size=1)
TEXTS = st.text(st.characters(codec="utf-8"))
KEYS = st.binary(min_size=32, max_size=32).map(key_of)


def read_filter(path: str, value: Any) -> Filter:
    if not isinstance(value, dict) or "team" not in value:
        raise InvalidInput(path, "is no filter", "write one")
    return In("team", (value["team"],))


def parse(text: str) -> KeyTable:
    return parse_key_file(text.encode(), read_filter)


def entry(**changes: str) -> str:
    fields = {"name": '"app"', "hash": f'"{hash_text(KEY)}"', "scopes": '["ask"]', **changes}
    return "[[keys]]\n" + "\n".join(f"{name} = {value}" for name, value in fields.items()) + "\n"


@given(
    name=NAMES,
    key=KEYS,
    scopes=SCOPES,
    tenant=st.none() | NAMES,
    priority=st.integers(-1000, 1000),
)
def test_an_entry_that_is_written_is_read_back(
    name: str, key: str, scopes: set[Scope], tenant: str | None, priority: int
) -> None:
    caller = Caller(name, tenant, frozenset(scopes), priority)
    assert parse(entry_text(caller, key)).find(key) == caller


@given(patterns=st.lists(TEXTS.filter(bool)), team=TEXTS)
def test_the_limits_of_an_entry_are_read_back(patterns: list[str], team: str) -> None:
    caller = replace(APP, collections=tuple(patterns))
    text = entry_text(caller, KEY, {"team": team, "left_out": None}, read_filter)
    assert parse(text).find(KEY) == replace(caller, filter=In("team", (team,)))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"scopes": frozenset()}, "scopes"),
        ({"tenant": "a b"}, "tenant"),
        ({"priority": 1001}, "priority"),
        ({"collections": ("a", "")}, "collections"),
        ({"scopes": frozenset({Scope.ADMIN}), "collections": ("a",)}, "collections"),
        ({"scopes": frozenset({Scope.WRITE}), "search_filter": {"team": "a"}}, "filter"),
        ({"search_filter": {"x": 1}}, "filter"),
    ],
)
def test_an_entry_that_a_file_may_not_have_is_not_written(
    fields: dict[str, Any], field: str
) -> None:
    properties = {name: value for name, value in fields.items() if name != "search_filter"}
    caller = replace(APP, **properties)
    with pytest.raises(InvalidInput) as raised:
        entry_text(caller, KEY, fields.get("search_filter"), read_filter)
    assert raised.value.field == field


@given(key=KEYS, sent=st.text())
def test_only_the_key_itself_is_found(key: str, sent: str) -> None:
    table = parse(entry_text(APP, key))
    assert (table.find(sent) is not None) == (sent == key)
    assert table.find(hash_text(key)) is None


@given(st.binary(max_size=200))
def test_any_content_is_parsed_or_refused(content: bytes) -> None:
    with suppress(InvalidInput):
        assert isinstance(parse_key_file(content, read_filter), KeyTable)


@given(left=NAMES, right=NAMES)
def test_tenants_have_domains_of_their_own(left: str, right: str) -> None:
    domains = Caller("a", left).domain, Caller("b", right).domain
    assert (domains[0] == domains[1]) == (left == right)
    assert PUBLIC_DOMAIN not in domains
    assert Caller("a", left).cache_salt == domains[0]


def test_callers_without_a_tenant_share_the_public_domain() -> None:
    assert ANYONE.domain == Caller("app").domain == PUBLIC_DOMAIN
    assert ANYONE.cache_salt is None


def test_a_caller_has_the_rules_of_its_tenant() -> None:
    tenants = (
        "[[tenants]]\nname = 'red'\nweight = 2\nquota = { tokens_per_day = 5 }\n"
        "[[tenants]]\nname = 'gone'\n"
    )
    quota = "{ requests_per_minute = 1 }"
    text = f"cached_token_price = 0.5\n{entry(tenant=repr('red'), quota=quota)}{tenants}"
    table = parse(text)
    caller = table.find(KEY)
    assert caller is not None
    assert caller.quota == (QuotaLimit(QuotaResource.REQUESTS, Period.MINUTE, 1),)
    tokens = QuotaLimit(QuotaResource.TOKENS, Period.DAY, 5)
    assert caller.rules == TenantRules(2.0, (tokens,))
    assert caller.cached_token_price == 0.5
    assert table.listed == {"red": caller.rules, "gone": TenantRules()}
    assert table.cached_token_price == 0.5


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("keys = 1", "keys"),
        ("[key]", "key"),
        ("tenants = 1", "tenants"),
        ("cached_token_price = 2", "cached_token_price"),
        ("cached_token_price = nan", "cached_token_price"),
        ("[[tenants]]\nweight = 1", "tenants[0].name"),
        ('[[tenants]]\nname = "a"\nweight = 0', "tenants[0].weight"),
        ('[[tenants]]\nname = "a"\nweight = true', "tenants[0].weight"),
        ('[[tenants]]\nname = "a"\nquota = { x = 1 }', "tenants[0].quota.x"),
        ('[[tenants]]\nname = "a"\nlimit = 1', "tenants[0].limit"),
        (2 * '[[tenants]]\nname = "a"\n', "tenants[1]"),
        (entry(quota="{ tokens_per_day = -1 }"), "keys[0].quota.tokens_per_day"),
        ("[[keys]]\nname = ", "keys"),
        (entry(name='"a b"'), "keys[0].name"),
        (entry(tenant='""'), "keys[0].tenant"),
        (entry(hash='"sha256:00"'), "keys[0].hash"),
        (entry(hash=f'"{KEY}"'), "keys[0].hash"),
        (entry(scopes="[]"), "keys[0].scopes"),
        (entry(scopes='["root"]'), "keys[0].scopes"),
        (entry(scopes="[[]]"), "keys[0].scopes"),
        (entry(priority="1001"), "keys[0].priority"),
        (entry(priority="true"), "keys[0].priority"),
        (entry(collections='"docs"'), "keys[0].collections"),
        (entry(role='"x"'), "keys[0].role"),
        (entry(filter="{ x = 1 }"), "keys[0].filter"),
        (entry(scopes='["admin"]', collections='["a"]'), "keys[0].collections"),
        (entry(scopes='["admin"]', filter='{ team = "a" }'), "keys[0].filter"),
        (entry(scopes='["ask", "write"]', filter='{ team = "a" }'), "keys[0].filter"),
        (entry() + entry(name='"b"'), "keys[1]"),
        (f"keys = {'[' * 2000}{']' * 2000}", "keys"),
        (entry() + entry(hash=f'"{hash_text(OTHER)}"'), "keys[1]"),
    ],
)
def test_a_wrong_file_names_the_field_and_shows_no_hash(text: str, field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        parse(text)
    assert raised.value.field == field
    assert hash_text(KEY) not in str(raised.value)
    assert KEY not in str(raised.value)


def test_a_file_without_entries_has_no_callers() -> None:
    assert parse("# no keys\n").find(KEY) is None


@pytest.mark.parametrize("key", ["secret", "rck-short", f"{KEY}x", ""])
def test_a_key_that_could_be_guessed_has_no_hash(key: str) -> None:
    with pytest.raises(InvalidInput, match="keys new"):
        hash_text(key)


def test_admin_includes_every_scope_and_the_others_only_themselves() -> None:
    admin = Caller("a", scopes=frozenset({Scope.ADMIN}))
    asks = Caller("b", scopes=frozenset({Scope.ASK}))
    assert all(admin.may(scope) for scope in Scope)
    assert [scope for scope in Scope if asks.may(scope)] == [Scope.ASK]


def test_a_key_is_for_the_collections_of_its_patterns() -> None:
    [caller] = parse(entry(collections='["docs", "team-a-*"]')).callers.values()
    assert [name for name in ("docs", "docs2", "team-a-1", "team-b") if caller.may_use(name)] == [
        "docs",
        "team-a-1",
    ]
    caller.check_collection("docs")
    with pytest.raises(
        NotAllowed, match=r"ragcache.collection: the key 'app' may not use 'team-b'"
    ):
        caller.check_collection("team-b", "ragcache.collection")


def test_the_filter_of_a_key_narrows_that_of_a_request() -> None:
    [caller] = parse(entry(filter='{ team = "core" }')).callers.values()
    own, wanted = In("team", ("core",)), In("year", ("2024",))
    assert caller.narrowed(None) == own
    assert caller.narrowed(wanted) == And((own, wanted))
    assert ANYONE.narrowed(wanted) == wanted
    assert ANYONE.narrowed(None) is None


def test_the_tenants_of_a_table_are_those_of_its_keys() -> None:
    second = entry(name='"b"', hash=f'"{hash_text(OTHER)}"', tenant='"blue"')
    assert parse(entry() + second).tenants == {"blue"}


def test_the_operator_has_a_key_with_all_scopes() -> None:
    operator = builtin_table({"operator": hash_text(KEY)}).find(KEY)
    assert operator is not None
    assert operator.may(Scope.ASK)
    with pytest.raises(InvalidInput, match="has no 'root'"):
        builtin_table({"root": hash_text(KEY)})


def sign(message: bytes) -> bytes:
    return hashlib.sha512(b"secret" + message).digest()


def is_signed(message: bytes, signature: bytes) -> bool:
    return sign(message) == signature


def test_a_collections_key_may_write_this_collection_only() -> None:
    caller = collection_caller(collection_key("faq", 2000, sign), is_signed, 1999.9)
    assert caller is not None
    assert caller.scopes == {Scope.WRITE}
    assert caller.may_use("faq")
    assert not any(map(caller.may_use, ("default", "faq2", "", "*")))


@pytest.mark.parametrize("name", ["default", "faq-2", "f*", "*", "", "a.b", "x" * 64])
def test_a_signature_is_of_one_collection(name: str) -> None:
    key = collection_key("faq", 2000, sign).replace("sync.faq.", f"sync.{name}.")
    assert collection_caller(key, is_signed, 1000) is None
    assert collection_caller(KEY, is_signed, 1000) is None


def test_a_collections_key_expires_when_it_says() -> None:
    key = collection_key("faq", 2000, sign)
    assert collection_caller(key, is_signed, 1999) is not None
    assert collection_caller(key, is_signed, 2000) is None
    for later in ("2001", "02000", "20000"):
        assert collection_caller(key.replace(".2000.", f".{later}."), is_signed, 1000) is None


@pytest.mark.parametrize("num_tenants", [0, 1, MAX_NAMED_TENANTS, MAX_NAMED_TENANTS + 1, 300])
def test_metrics_name_the_first_tenants_of_the_file(num_tenants: int) -> None:
    # Each tenant has two keys, the second ones in the other order.
    order = [*range(num_tenants), *reversed(range(num_tenants))]
    keys = [key_of(index.to_bytes(32, "big")) for index in range(len(order) + 1)]
    entries = [
        entry_text(replace(APP, name=f"key-{index}", tenant=f"team-{number}"), key)
        for index, (key, number) in enumerate(zip(keys[1:], order, strict=True))
    ]
    table = parse("".join([entry_text(replace(APP, name="shared"), keys[0]), *entries]))

    def label(key: str) -> str:
        caller = table.find(key)
        assert caller is not None
        return caller.tenant_label

    assert label(keys[0]) == NO_TENANT
    for key, number in zip(keys[1:], order, strict=True):
        is_named = number < MAX_NAMED_TENANTS
        assert label(key) == (f"team-{number}" if is_named else OTHER_TENANTS)


@given(NAMES)
def test_no_tenant_has_the_label_of_others_or_of_none(name: str) -> None:
    assert Caller("app", name).tenant_label == name
    assert name not in (NO_TENANT, OTHER_TENANTS)
    assert ANYONE.tenant_label == NO_TENANT


def test_limits_of_requests_at_once_and_reserved_shares_are_read() -> None:
    content = (
        f'[[keys]]\nname = "a"\nhash = "sha256:{"0" * 64}"\nscopes = ["ask"]\ntenant = "red"\n'
        'max_concurrent = 4\n[[tenants]]\nname = "red"\nmax_concurrent = 8\nreserved_share = 0.25\n'
    )
    table = parse_key_file(content.encode(), read_filter)
    [caller] = table.callers.values()
    assert (caller.max_concurrent, caller.rules.max_concurrent) == (4, 8)
    assert table.listed["red"].reserved_share == 0.25


@pytest.mark.parametrize(
    ("tenants", "named"),
    [
        ('[[tenants]]\nname = "a"\nmax_concurrent = 0\n', "tenants[0].max_concurrent"),
        ('[[tenants]]\nname = "a"\nreserved_share = 0.9\n', "tenants[0].reserved_share"),
        (
            '[[tenants]]\nname = "a"\nreserved_share = 0.5\n'
            '[[tenants]]\nname = "b"\nreserved_share = 0.5\n',
            "tenants: reserve 1 ",
        ),
    ],
)
def test_wrong_shares_name_their_field(tenants: str, named: str) -> None:
    with pytest.raises(InvalidInput) as error:
        parse_key_file(tenants.encode(), read_filter)
    assert str(error.value).startswith(named)
