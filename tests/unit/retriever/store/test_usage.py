"""Usage is added once, and summed by window for keys and tenants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.usage import Period, UsageCounts, window_start
from ragcache_retriever.store.usage import (
    KEPT_DAYS,
    WAITING_MS,
    CountedUse,
    UsageSender,
    UsageTable,
    UsageWanted,
)
from tests.kit.memory_database import MemoryDatabase

NOW_S = 1_700_000_040
MINUTE_S = window_start(Period.MINUTE, NOW_S)
NOW_MS = 1000 * NOW_S
GATEWAY = bytes(16)
OTHER = bytes(range(16))
DAY_S = 24 * 3600


@pytest.fixture
def table() -> Iterator[UsageTable]:
    database = MemoryDatabase()
    yield UsageTable(database)
    database.close()


def used(key: str, tokens: int, *, tenant: str = "", at_s: int = MINUTE_S) -> CountedUse:
    return CountedUse(at_s, tenant, key, "m", UsageCounts(requests=1, computed_tokens=tokens))


def tokens(table: UsageTable, owner: str, name: str, at_s: int = NOW_S) -> dict[Period, int]:
    return {
        one.period: one.counts.computed_tokens for one in table.totals(owner, [name, "x"], at_s)
    }


def test_a_repeated_call_adds_nothing(table: UsageTable) -> None:
    assert table.add(UsageSender(GATEWAY, 1), [used("app", 10)], NOW_MS)
    assert not table.add(UsageSender(GATEWAY, 1), [used("app", 10)], NOW_MS)
    assert table.add(UsageSender(OTHER, 1), [used("app", 1)], NOW_MS)
    assert table.add(UsageSender(GATEWAY, 2), [used("app", 100)], NOW_MS)
    assert not table.add(UsageSender(GATEWAY, 1), [used("app", 10)], NOW_MS)
    assert tokens(table, "key", "app") == dict.fromkeys(Period, 111)


def test_totals_are_those_of_the_current_windows(table: UsageTable) -> None:
    table.add(
        UsageSender(GATEWAY, 1), [used("app", 1), used("app", 10, at_s=MINUTE_S - 60)], NOW_MS
    )
    table.add(UsageSender(GATEWAY, 2), [used("app", 100, at_s=MINUTE_S - DAY_S)], NOW_MS)
    table.add(UsageSender(GATEWAY, 3), [used("app", 1000, at_s=MINUTE_S - 40 * DAY_S)], NOW_MS)
    assert tokens(table, "key", "app") == {Period.MINUTE: 1, Period.DAY: 11, Period.MONTH: 111}


def test_a_tenant_has_the_use_of_all_its_keys(table: UsageTable) -> None:
    counted = [used("a", 1, tenant="red"), used("b", 10, tenant="red"), used("c", 100)]
    table.add(UsageSender(GATEWAY, 1), counted, NOW_MS)
    assert tokens(table, "tenant", "red") == dict.fromkeys(Period, 11)
    assert tokens(table, "key", "b") == dict.fromkeys(Period, 10)
    assert table.totals("tenant", [], NOW_S) == []


def test_gateways_learn_what_waits_at_the_others(table: UsageTable) -> None:
    table.add(UsageSender(GATEWAY, 1, b"one"), [], NOW_MS)
    table.add(UsageSender(OTHER, 1, b"two"), [], NOW_MS)
    assert table.waiting(GATEWAY, NOW_MS) == [b"two"]
    assert table.waiting(OTHER, NOW_MS) == [b"one"]
    assert table.waiting(OTHER, NOW_MS + WAITING_MS) == []
    table.add(UsageSender(OTHER, 2), [], NOW_MS)
    assert table.waiting(GATEWAY, NOW_MS) == []


def test_old_rows_are_forgotten(table: UsageTable) -> None:
    table.add(UsageSender(GATEWAY, 1), [used("app", 1)], NOW_MS)
    later_s = NOW_S + (KEPT_DAYS[Period.DAY] + 1) * DAY_S
    later = used("app", 10, at_s=window_start(Period.MINUTE, later_s))
    table.add(UsageSender(OTHER, 1), [later], 1000 * later_s)
    for period, count in ((Period.MINUTE, 1), (Period.DAY, 1), (Period.MONTH, 2)):
        wanted = UsageWanted(period, 0, 2 * later_s)
        assert len(table.page(wanted, 10)) == count


names = st.sampled_from(["", "a", "b", "ä"])


@given(
    st.lists(
        st.builds(
            CountedUse,
            st.integers(0, 5).map(lambda day: day * DAY_S),
            names,
            names,
            names,
            st.builds(UsageCounts, *[st.integers(0, 9)] * 7),
        ),
        max_size=20,
    ),
    st.integers(1, 4),
    st.none() | names,
    st.none() | names,
)
def test_pages_have_every_row_once(
    counted: list[CountedUse], limit: int, tenant: str | None, key: str | None
) -> None:
    table = UsageTable(MemoryDatabase())
    table.add(UsageSender(GATEWAY, 1), counted, 0)
    expected: dict[tuple[int, str, str, str], UsageCounts] = {}
    for one in counted:
        is_wanted = tenant in (None, one.tenant) and key in (None, one.key)
        if is_wanted and DAY_S <= one.start_unix_s < 4 * DAY_S:
            expected[one.position] = expected.get(one.position, UsageCounts()) + one.counts
    found: list[CountedUse] = []
    after = (-1, "", "", "")
    while page := table.page(UsageWanted(Period.DAY, DAY_S, 4 * DAY_S, tenant, key, after), limit):
        assert len(page) <= limit
        found += page
        after = page[-1].position
    assert [one.position for one in found] == sorted(expected)
    assert {one.position: one.counts for one in found} == expected
