"""Tenants of tokens count as those of keys: for deletes, shares, rules and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragcache_core.access.caller import MAX_NAMED_TENANTS, NotAllowed, Scope
from ragcache_core.access.key_file import KeyTable
from ragcache_core.access.token_claims import TokenIssuer
from ragcache_core.errors import InvalidInput
from ragcache_gateway.auth.api_keys import ApiKeys, api_keys
from tests.kit.clock import ManualClock
from tests.kit.gateway import CONFIG, write_keys

FILE = """
cached_token_price = 0.5
[[tenants]]
name = "red"
weight = 2
reserved_share = 0.25
quota = { requests_per_day = 9 }
[[tenants]]
name = "idle"
reserved_share = 0.5
"""


def issuer(name: str = "id", **changes: Any) -> TokenIssuer:
    scopes = {Scope.ASK: ("asker",)}
    found = {"scopes": scopes, "tenant_claim": "org", **changes}
    return TokenIssuer(name, f"https://{name}.example.com", ("ragcache",), **found)


def keys_of(tmp_path: Path, *issuers: TokenIssuer, clock: ManualClock | None = None) -> ApiKeys:
    path = write_keys(tmp_path / "keys.toml", {"a": 'scopes = ["ask"]\ntenant = "blue"'})
    path.write_text(FILE + path.read_text())
    return ApiKeys(path, KeyTable({}), issuers=issuers, clock=clock or ManualClock())


def claims(**changes: Any) -> dict[str, Any]:
    return {"sub": "jane", "roles": "asker", **changes}


def test_without_tokens_only_tenants_with_a_key_count(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    assert keys.tenants() == {"blue"}
    assert keys.shares().weights == {"blue": 1.0}
    assert keys.shares().reserved == {}


def test_tenants_of_tokens_get_deletes_shares_and_rules(tmp_path: Path) -> None:
    mapped = issuer("other", tenants={"/teams/green": "green"})
    keys = keys_of(tmp_path, issuer(), mapped)
    assert keys.tenants() == {"blue", "red", "idle", "green"}
    assert keys.shares().weights == {"blue": 1.0, "red": 2.0, "idle": 1.0, "green": 1.0}
    assert keys.shares().reserved == {"red": 0.25, "idle": 0.5}
    caller = keys.token_caller(issuer(), claims(org="red"))
    assert caller.rules.weight == 2.0
    assert caller.rules.quota[0].limit == 9
    assert caller.cached_token_price == 0.5
    assert caller.tenant_label == "red"
    green = keys.token_caller(mapped, claims(org="/teams/green"))
    assert (green.tenant, green.tenant_label) == ("green", "green")
    with pytest.raises(NotAllowed):
        keys.token_caller(issuer(), claims(org="blue"))  # of a key alone, which no token may name


def test_a_change_of_the_listed_tenants_is_read(tmp_path: Path) -> None:
    clock = ManualClock()
    keys = keys_of(tmp_path, issuer(), clock=clock)
    path = tmp_path / "keys.toml"
    path.write_text(FILE.replace("idle", "busy") + path.read_text().partition(FILE)[2])
    clock.now += 2.0
    assert keys.tenants() == {"blue", "red", "busy"}
    path.write_text(path.read_text().replace("weight = 2", "weight = 3"))
    clock.now += 2.0
    assert keys.shares().weights["red"] == 3.0


def test_metrics_name_a_bounded_number_of_tenants(tmp_path: Path) -> None:
    many = {f"g{number:03}": f"t{number:03}" for number in range(MAX_NAMED_TENANTS + 9)}
    mapped = issuer(tenants=many)
    keys = keys_of(tmp_path, mapped)
    labels = {keys.token_caller(mapped, claims(org=value)).tenant_label for value in many}
    # The key's tenant has one of the names.
    assert len(labels) == MAX_NAMED_TENANTS
    assert "_other" in labels


def test_tokens_need_a_key_file_beside_them() -> None:
    with pytest.raises(InvalidInput, match="RAGCACHE_OIDC: is set, but requests need no key"):
        api_keys(CONFIG.replace(oidc=(issuer(),)))
