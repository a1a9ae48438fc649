"""The outbox keeps each delete until every shard has acknowledged it, and its size is bounded."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcache_core.identity.keys import KEY_BYTES
from ragcache_retriever.store import outbox as module
from ragcache_retriever.store.outbox import (
    CLAIM_MS,
    COUNT_EVERY,
    DELETE_CHUNKS,
    EXPIRY_MS,
    KEEP_MS,
    REPEAT_MS,
    Outbox,
)
from ragcache_retriever.store.records import OutboxDelete
from tests.kit.memory_database import MemoryDatabase

NOW_MS = 1_700_000_000_000


@pytest.fixture
def database() -> Iterator[MemoryDatabase]:
    database = MemoryDatabase()
    yield database
    database.close()


@pytest.fixture
def connection(database: MemoryDatabase) -> sqlite3.Connection:
    return database.connection


@pytest.fixture
def outbox(database: MemoryDatabase) -> Outbox:
    return Outbox(database)


def digests(count: int) -> list[bytes]:
    return [number.to_bytes(KEY_BYTES) for number in range(count)]


def add(outbox: Outbox, document: str, *, claim: bool = False, num_chunks: int = 1) -> OutboxDelete:
    [delete] = outbox.add("c", document, digests(num_chunks), names_document=True, now_ms=NOW_MS)
    if claim:
        assert outbox.claim_of("c", document, NOW_MS, is_repeated=False) == (delete,)
    return delete


def test_a_removal_of_many_chunks_is_several_deletes(outbox: Outbox) -> None:
    wanted = digests(2 * DELETE_CHUNKS + 1)
    added = outbox.add("c", "d", wanted, names_document=True, now_ms=NOW_MS)
    assert [len(one.token_digests) for one in added] == [DELETE_CHUNKS, DELETE_CHUNKS, 1]
    assert [one.names_document for one in added] == [True, False, False]
    assert outbox.claim(10, NOW_MS).deletes == added
    assert [digest for one in added for digest in one.token_digests] == wanted


def test_a_change_that_removes_nothing_needs_no_delete(outbox: Outbox) -> None:
    assert not outbox.add("c", "d", [], names_document=False, now_ms=NOW_MS)


@pytest.mark.parametrize("claim", [True, False])
def test_a_claim_ends_after_a_while_and_the_delete_keeps_its_id(
    outbox: Outbox, claim: bool
) -> None:
    delete = add(outbox, "d", claim=claim)
    if not claim:
        assert outbox.claim(10, NOW_MS).deletes == (delete,)
    assert not outbox.claim(10, NOW_MS + CLAIM_MS).deletes
    assert outbox.claim(10, NOW_MS + CLAIM_MS + 1).deletes == (delete,)


def test_a_clock_that_is_set_back_ends_claims(outbox: Outbox) -> None:
    delete = add(outbox, "d", claim=True)
    assert outbox.claim(10, NOW_MS - REPEAT_MS).deletes == (delete,)


def test_those_that_waited_longest_are_claimed_first(outbox: Outbox) -> None:
    first, second, third = (add(outbox, name) for name in "abc")
    assert outbox.claim(2, NOW_MS).deletes == (first, second)
    assert outbox.claim(2, NOW_MS + CLAIM_MS + 1).deletes == (first, third)


def test_a_backlog_is_not_counted_at_each_claim(
    connection: sqlite3.Connection, outbox: Outbox
) -> None:
    for number in range(2 * COUNT_EVERY + 1):
        add(outbox, f"d{number}")
    statements: list[str] = []
    connection.set_trace_callback(statements.append)

    def claim() -> int:
        claim = outbox.claim(1, NOW_MS)
        outbox.acknowledge([one.id for one in claim.deletes], [], NOW_MS)
        return claim.num_unacknowledged

    counts = [claim() for _ in range(2 * COUNT_EVERY)]
    assert sum("count(*)" in one for one in statements) == 2
    assert counts[0] == 2 * COUNT_EVERY + 1
    assert counts[COUNT_EVERY] == COUNT_EVERY + 1
    # The last claims count again.
    assert (claim(), claim()) == (1, 0)


def test_a_complete_delete_is_claimed_no_more_and_forgotten_later(
    connection: sqlite3.Connection, outbox: Outbox
) -> None:
    delete = add(outbox, "d")
    outbox.acknowledge([delete.id], [], NOW_MS)
    claim = outbox.claim(10, NOW_MS + KEEP_MS)
    assert (claim.deletes, claim.num_unacknowledged) == ((), 0)
    assert outbox.claim_of("c", "d", NOW_MS, is_repeated=True) == ()
    assert outbox.knows("c", "d")
    assert [one.document for one in outbox.removals(0, 10)[0]] == ["d"]
    outbox.claim(10, NOW_MS + KEEP_MS + 1)
    assert not outbox.knows("c", "d")
    assert outbox.removals(0, 10)[0] == []
    assert outbox.last_sequence() == 1


def test_a_delete_that_one_shard_has_is_repeated_seldom_and_ends_after_a_day(
    outbox: Outbox,
) -> None:
    delete = add(outbox, "d")
    outbox.acknowledge([], [delete.id], NOW_MS)
    assert not outbox.claim(10, NOW_MS + REPEAT_MS).deletes
    again = outbox.claim(10, NOW_MS + REPEAT_MS + 1)
    assert [(one.id, one.acknowledged_unix_ms) for one in again.deletes] == [(delete.id, NOW_MS)]
    assert again.num_unacknowledged == 0
    assert not outbox.claim(10, NOW_MS + EXPIRY_MS).deletes


def test_a_delete_that_no_shard_has_never_expires(outbox: Outbox) -> None:
    delete = add(outbox, "d")
    assert outbox.claim(10, NOW_MS + 100 * EXPIRY_MS).deletes == (delete,)


def set_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNACKNOWLEDGED", 8)
    monkeypatch.setattr(module, "CHECK_EVERY", 4)
    monkeypatch.setattr(module, "MAX_PARTIAL", 8)


def test_too_many_deletes_without_acknowledgement_become_one_of_everything(
    connection: sqlite3.Connection, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bounds(monkeypatch)
    for number in range(40):
        add(outbox, f"d{number}")
    deletes = outbox.claim(100, NOW_MS).deletes
    assert len(deletes) <= 8 + 4
    assert sum(one.everything for one in deletes) == 1
    # Gateways still learn of each document.
    assert {one.document for one in outbox.removals(0, 100)[0]} == {
        f"d{number}" for number in range(40)
    }


def test_deletes_that_one_of_everything_replaced_are_forgotten_while_no_shard_answers(
    connection: sqlite3.Connection, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bounds(monkeypatch)
    for number in range(8):
        add(outbox, f"d{number}")
    [everything] = outbox.claim(100, NOW_MS + KEEP_MS + 1).deletes
    assert everything.everything
    assert connection.execute("SELECT id FROM outbox").fetchall() == [(everything.id,)]


def test_deletes_that_a_shard_has_are_not_replaced_by_one_of_everything(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bounds(monkeypatch)
    added = []
    for number in range(40):
        added.append(add(outbox, f"d{number}"))
        outbox.acknowledge([], [added[-1].id], NOW_MS + number)
    found = outbox.claim(100, NOW_MS + 40 + REPEAT_MS).deletes
    assert not any(one.everything for one in found)
    # The newest stay. Shards tell each other of the others.
    assert {one.id for one in added[-8:]} <= {one.id for one in found}
    assert len(found) <= 8 + 4


def test_one_of_everything_replaces_no_delete_that_a_shard_has(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bounds(monkeypatch)
    partial = add(outbox, "partial")
    outbox.acknowledge([], [partial.id], NOW_MS)
    for number in range(11):
        add(outbox, f"d{number}")
    found = outbox.claim(100, NOW_MS + REPEAT_MS + 1).deletes
    assert sum(one.everything for one in found) == 1
    assert partial.id in {one.id for one in found}


def test_a_repeated_change_gets_the_delete_of_everything_that_replaced_its_own(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bounds(monkeypatch)
    for number in range(8):
        add(outbox, f"d{number}")
    [everything] = outbox.claim_of("c", "d0", NOW_MS, is_repeated=True)
    assert everything.everything
    # A change that no delete was made for waits for none.
    assert outbox.claim_of("c", "other", NOW_MS, is_repeated=True) == ()
    outbox.acknowledge([], [everything.id], NOW_MS)
    assert outbox.claim_of("c", "d0", NOW_MS, is_repeated=False) == ()
    [again] = outbox.claim_of("c", "d0", NOW_MS, is_repeated=True)
    assert again.id == everything.id
    outbox.acknowledge([everything.id], [], NOW_MS)
    assert outbox.claim_of("c", "d0", NOW_MS, is_repeated=True) == ()


class OutboxMachine(RuleBasedStateMachine):
    """Gateways that end at any time lose no delete."""

    def __init__(self) -> None:
        super().__init__()
        self.database = MemoryDatabase()
        self.outbox = Outbox(self.database)
        self.now_ms = NOW_MS
        self.pending: dict[bytes, int | None] = {}  # time of the first acknowledgement, by id

    @rule(claim=st.booleans(), num_chunks=st.integers(0, 2 * DELETE_CHUNKS))
    def remove(self, claim: bool, num_chunks: int) -> None:
        added = self.outbox.add(
            "c", "d", digests(num_chunks), names_document=True, now_ms=self.now_ms
        )
        self.pending |= dict.fromkeys([one.id for one in added])
        if claim:
            claimed = self.outbox.claim_of("c", "d", self.now_ms, is_repeated=False)
            unacknowledged = {one for one, at_ms in self.pending.items() if at_ms is None}
            assert {one.id for one in claimed} == unacknowledged

    @rule(limit=st.integers(1, 4), data=st.data())
    def send(self, limit: int, data: st.DataObject) -> None:
        claimed = [one.id for one in self.outbox.claim(limit, self.now_ms).deletes]
        assert claimed == list(dict.fromkeys(claimed))
        assert set(claimed) <= self.pending.keys()
        outcomes = data.draw(
            st.lists(
                st.sampled_from(["complete", "partial", "lost"]),
                min_size=len(claimed),
                max_size=len(claimed),
            )
        )
        told = list(zip(claimed, outcomes, strict=True))
        complete = [one for one, outcome in told if outcome == "complete"]
        partial = [one for one, outcome in told if outcome == "partial"]
        self.outbox.acknowledge(complete, partial, self.now_ms)
        for one in complete:
            del self.pending[one]
        for one in partial:
            self.pending[one] = self.pending[one] or self.now_ms

    @rule(ms=st.sampled_from([1, CLAIM_MS + 1, REPEAT_MS + 1, KEEP_MS, EXPIRY_MS]))
    def wait(self, ms: int) -> None:
        self.now_ms += ms

    @invariant()
    def every_delete_without_acknowledgement_is_pending(self) -> None:
        rows = self.database.query("SELECT id FROM outbox WHERE complete = 0")
        found = {one for (one,) in rows}
        for one, acknowledged_ms in self.pending.items():
            is_old = acknowledged_ms is not None and self.now_ms - acknowledged_ms >= EXPIRY_MS
            assert is_old or one in found
        self.pending = {one: at for one, at in self.pending.items() if one in found}

    def teardown(self) -> None:
        self.database.close()


TestOutboxMachine = OutboxMachine.TestCase
TestOutboxMachine.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
