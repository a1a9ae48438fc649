"""A delete of many variants: it takes effect at once, and drops them in batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragcache_cachestore import deletes
from ragcache_cachestore.deletes import DROP_BATCH
from ragcache_cachestore.state.leases import ReadLease
from ragcache_cachestore.store import Store
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Origin
from ragcache_core.store_api import Ack, AsOf, Deletion, LookupKey, PutOutcome, ReportedUses
from tests.kit.store import get, key, opened, put

NUM_DELETED = 3 * DROP_BATCH + 5
"""The last batch has more variants than a test stores again before it. The order in which variants
are dropped is another one in each process."""

HEAD = key(10_000)
DELETED = [key(number) for number in range(NUM_DELETED)]
KEPT = [key(number) for number in range(NUM_DELETED, NUM_DELETED + 5)]
ORIGIN = Origin(prefix_chunks=(HEAD.chunk,), domain="acme", document="a.md")
WHAT: dict[str, dict[str, Any]] = {
    "domain": {"domain": "acme"},
    "document": {"domain": "acme", "documents": ("a.md",)},
    "chunk": {"chunks": (HEAD.chunk,)},
}


class Killed(BaseException):
    """Stands for the end of the process."""


def fill_store(store: Store) -> None:
    """Store the variants, every third one also on disk."""
    for number, one in enumerate(DELETED):
        ack = Ack.ACCEPTED if number % 3 else Ack.DURABLE
        assert put(store, one, b"x", ack=ack, origin=ORIGIN) is PutOutcome.STORED
    for one in KEPT:
        put(store, one, b"kept", ack=Ack.DURABLE)
    store.mover.writer.flush()


def after_each_batch(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Act between two batches, while the lock is free."""
    monkeypatch.setattr(deletes, "time", SimpleNamespace(sleep=lambda _: act()))


def assert_nothing_is_served(store: Store, keys: list[VariantKey]) -> None:
    assert {get(store, one) for one in keys} == {Miss.DELETED}
    by_variant = store.reads.lookup([LookupKey.for_variant(one) for one in keys]).variants
    assert {(one.stored, one.miss) for one in by_variant} == {((), Miss.DELETED)}
    by_chunk = store.reads.lookup([LookupKey(one.chunk) for one in keys]).variants
    assert not any(one.stored for one in by_chunk)
    assert set(store.reads.find_misses(keys)) == {Miss.DELETED}
    assert store.variants.prefetch(keys) == 0
    assert store.reads.note_uses([ReportedUses(one) for one in keys]) == 0
    assert {store.reads.note_reread(one, 1) for one in keys} == {0}


@pytest.mark.parametrize("what", WHAT)
def test_between_two_batches_nothing_is_served_that_the_delete_covers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    left = []

    def read() -> None:
        left.append(len(store))
        assert_nothing_is_served(store, DELETED)
        assert {get(store, one) for one in KEPT} == {b"kept"}
        store.check()

    with opened(tmp_path) as store:
        fill_store(store)
        before = store.reads.lookup([]).as_of
        after_each_batch(monkeypatch, read)
        withdrawals = store.status_page._words[0]
        assert store.deletes.apply([Deletion(b"", **WHAT[what])]) == NUM_DELETED
        assert store.status_page._words[0] == withdrawals + 1, "counted before the first batch"
        assert left == [NUM_DELETED + len(KEPT) - DROP_BATCH * n for n in (1, 2, 3)]
        assert_nothing_is_served(store, DELETED)
        assert len(store) == len(KEPT)
        assert put(store, DELETED[0], b"old", as_of=before, origin=ORIGIN) is PutOutcome.DELETED


def test_between_two_batches_puts_that_have_seen_the_delete_are_stored_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[VariantKey] = []

    def store_again() -> None:
        # One variant that is dropped already, and one that is not.
        for present in (False, True):
            one = next(
                one
                for one in DELETED
                if one not in again and (store.state.catalog.get(one) is not None) is present
            )
            assert put(store, one, b"old", as_of=AsOf(), origin=ORIGIN) is PutOutcome.DELETED
            outcome = put(store, one, b"new", ack=Ack.DURABLE, origin=ORIGIN)
            assert outcome is PutOutcome.STORED
            again.append(one)
        assert {get(store, one) for one in again} == {b"new"}

    with opened(tmp_path, flush=False) as store:
        fill_store(store)
        after_each_batch(monkeypatch, store_again)
        store.deletes.apply([Deletion(b"", domain="acme")])
        assert len(again) == 6
        assert {get(store, one) for one in again} == {b"new"}
        assert len(store) == len(again) + len(KEPT)
    with opened(tmp_path) as store:
        assert {get(store, one) for one in again} == {b"new"}
        assert len(store) == len(again) + len(KEPT)


def test_a_value_that_was_leased_before_the_delete_can_still_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        fill_store(store)
        leases = store.reads.open(DELETED)
        after_each_batch(monkeypatch, lambda: None)
        store.deletes.apply([Deletion(b"", domain="acme")])
        for lease in leases:
            assert isinstance(lease, ReadLease)
            assert store.reads.is_leased(lease.id)
        store.reads.note_opened(leases)
        store.reads.release([lease.id for lease in leases if isinstance(lease, ReadLease)])
        assert store.stats().memory_bytes == len(KEPT) * len(b"kept")


@pytest.mark.parametrize("num_batches", [1, 3])
def test_a_kill_between_two_batches_loses_no_part_of_the_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_batches: int
) -> None:
    batches = 0

    def kill() -> None:
        nonlocal batches
        batches += 1
        if batches == num_batches:
            raise Killed

    with opened(tmp_path, flush=False) as store:
        fill_store(store)
        before = store.reads.lookup([]).as_of
        after_each_batch(monkeypatch, kill)
        store.metadata.remove = lambda keys: None  # type: ignore[method-assign]
        with pytest.raises(Killed):
            store.deletes.apply([Deletion(bytes(16), domain="acme")])
    monkeypatch.undo()
    with opened(tmp_path) as store:
        assert not any(isinstance(get(store, one), bytes) for one in DELETED)
        assert {get(store, one) for one in KEPT} == {b"kept"}
        assert len(store) == len(KEPT)
        assert store.deletes.apply([Deletion(bytes(16), domain="acme")]) == 0, "it is applied"
        assert put(store, DELETED[0], b"old", as_of=before, origin=ORIGIN) is PutOutcome.DELETED


def test_missed_deletes_withdraw_everything_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        fill_store(store)
        batches = []

        def read() -> None:
            batches.append(len(store))
            assert all(isinstance(get(store, one), Miss) for one in (*DELETED, *KEPT))

        after_each_batch(monkeypatch, read)
        assert store.deletes.drop_all() == NUM_DELETED + len(KEPT)
        assert len(batches) == 3
        assert get(store, KEPT[0]) is Miss.EVICTED
