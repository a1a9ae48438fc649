"""The grace before the KV of a tenant without keys is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_core.access.key_file import KeyTable
from ragcache_gateway.auth.api_keys import ApiKeys
from ragcache_gateway.auth.tenant_domains import TenantDomains
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.watched import watched_file
from tests.kit.clock import ManualClock
from tests.kit.gateway import write_keys

RED = 'scopes = ["ask"]\ntenant = "red"'
BLUE = 'scopes = ["ask"]\ntenant = "blue"'
GRACE_S = 900.0


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a changed file at once."""
    monkeypatch.setattr(watched_file, "CHECK_EVERY_S", 0.0)


class Grace:
    """A key file, and the domains that follow from it."""

    def __init__(self, path: Path) -> None:
        self.path = write_keys(path, {"red": RED, "blue": BLUE})
        self.keys = ApiKeys(self.path, KeyTable({}))
        self.clock = ManualClock()
        retriever = RetrieverClient("127.0.0.1:9")
        self.domains = TenantDomains(self.keys, retriever, GRACE_S, self.clock)
        self.domains.current()

    def at(self, now_s: float) -> tuple[set[str], set[str]]:
        """Return the domains that may hold KV, and the tenants that are being deleted."""
        self.clock.now = now_s
        return set(self.domains.current()), set(self.domains._leaving)


@pytest.fixture
async def grace(tmp_path: Path) -> Grace:
    return Grace(tmp_path / "keys.toml")


ALL = {"public", "tenant:red", "tenant:blue"}


async def test_a_tenant_is_deleted_after_the_grace_and_gets_deletes_until_then(
    grace: Grace,
) -> None:
    write_keys(grace.path, {"blue": BLUE})
    assert grace.at(0.0) == (ALL, set())
    assert grace.at(GRACE_S - 1) == (ALL, set())
    assert grace.at(GRACE_S) == (ALL, {"red"})


async def test_a_key_that_comes_back_ends_the_grace_and_a_later_loss_begins_it_again(
    grace: Grace,
) -> None:
    write_keys(grace.path, {"blue": BLUE})
    grace.at(0.0)
    write_keys(grace.path, {"blue": BLUE, "red-2": RED})
    assert grace.at(GRACE_S - 1) == (ALL, set())
    write_keys(grace.path, {"blue": BLUE})
    assert grace.at(GRACE_S) == (ALL, set())
    assert grace.at(2 * GRACE_S - 1) == (ALL, set())
    assert grace.at(2 * GRACE_S) == (ALL, {"red"})


@pytest.mark.parametrize("content", ["", "# nothing", "[[tenants]]\nname = 'red'\n", "[[keys]]"])
async def test_a_file_that_lost_its_keys_changes_nothing_and_is_stale(
    grace: Grace, content: str
) -> None:
    assert not grace.keys.is_stale()
    grace.path.write_text(content)
    assert grace.at(0.0) == (ALL, set())
    assert grace.at(2 * GRACE_S) == (ALL, set())
    assert grace.keys.is_stale()
    write_keys(grace.path, {"red": RED, "blue": BLUE})
    assert not grace.keys.is_stale()


async def test_a_file_that_is_removed_is_stale(grace: Grace) -> None:
    grace.path.unlink()
    assert grace.keys.is_stale()
    assert grace.at(2 * GRACE_S) == (ALL, set())


async def test_a_file_may_say_that_it_has_no_keys(grace: Grace) -> None:
    grace.path.write_text("keys = []\n")
    assert not grace.keys.is_stale()
    assert grace.at(0.0) == (ALL, set())
    assert grace.at(GRACE_S) == (ALL, {"red", "blue"})
