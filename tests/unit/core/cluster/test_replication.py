"""Replicas: what is hot on a busy shard is copied, what has cooled is dropped, nothing flaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cluster.replication import (
    ReplicationChanges,
    ReplicationThresholds,
    ServedBytes,
    ShardLoad,
    decide_replication,
)
from ragcache_core.identity.keys import VariantKey

BUSY = ReplicationThresholds(copy_share=0.2, drop_share=0.05, min_bytes_per_s=1000.0, max_replicas=2)


def key(number: int) -> VariantKey:
    return VariantKey(number.to_bytes(16, "big"), bytes(16))


def load(**rates: float) -> ShardLoad:
    by_variant = {key(int(name[1:])): rate for name, rate in rates.items()}
    return ShardLoad(sum(rates.values()), by_variant)


def test_what_makes_up_much_of_a_busy_shards_load_is_copied_the_hottest_first() -> None:
    found = decide_replication(load(v1=300, v2=500, v3=40, v4=160), frozenset(), BUSY)
    assert found == ReplicationChanges(copy=(key(2), key(1)))


def test_a_shard_that_is_not_busy_copies_nothing() -> None:
    assert decide_replication(load(v1=900), frozenset(), BUSY) == ReplicationChanges()
    assert decide_replication(load(), frozenset(), BUSY) == ReplicationChanges()


def test_what_has_a_replica_keeps_it_between_the_two_shares() -> None:
    held = frozenset({key(1)})
    assert (
        decide_replication(load(v1=100, v2=190, v3=190, v4=190, v5=190, v6=190), held, BUSY)
        == ReplicationChanges()
    )


def test_what_has_cooled_loses_its_replica() -> None:
    assert decide_replication(load(v1=10, v2=990), frozenset({key(1)}), BUSY).drop == (key(1),)
    assert decide_replication(load(), frozenset({key(1)}), BUSY).drop == (key(1),)


def test_there_are_never_more_replicas_than_allowed() -> None:
    hot = load(v1=500, v2=500, v3=500)
    assert (
        len(decide_replication(hot, frozenset({key(9)}), BUSY).copy) == 2
    )  # 9 is cold and makes room
    assert len(decide_replication(hot, frozenset({key(1), key(2)}), BUSY).copy) == 0


keys = st.integers(0, 8).map(key)
loads = st.dictionaries(keys, st.floats(0, 1e9), max_size=9).map(
    lambda rates: ShardLoad(sum(rates.values()), rates)
)


@given(loads, st.frozensets(keys))
def test_a_decision_carried_out_is_followed_by_no_other(
    load: ShardLoad, replicated: frozenset[VariantKey]
) -> None:
    first = decide_replication(load, replicated, BUSY)
    assert set(first.drop) <= replicated
    assert not set(first.copy) & replicated
    after = (replicated - set(first.drop)) | set(first.copy)
    assert decide_replication(load, after, BUSY) == ReplicationChanges()


@given(loads, st.frozensets(keys), st.randoms())
def test_the_order_of_what_is_known_decides_nothing(
    load: ShardLoad, replicated: frozenset[VariantKey], random: object
) -> None:
    rates = list(load.by_variant.items())
    random.shuffle(rates)  # type: ignore[attr-defined]
    assert decide_replication(
        ShardLoad(load.bytes_per_s, dict(rates)), replicated, BUSY
    ) == decide_replication(load, replicated, BUSY)


def test_a_steady_stream_is_measured_as_what_it_is() -> None:
    served = ServedBytes(half_life_s=10.0)
    for tick in range(10_000):
        served.add(key(tick % 2), 100, now=tick / 10)
    found = served.measure_load(now=1000.0)
    assert found.bytes_per_s == pytest.approx(1000, rel=0.01)
    assert found.by_variant[key(0)] == pytest.approx(500, rel=0.02)


def test_what_is_served_no_more_is_forgotten() -> None:
    served = ServedBytes(half_life_s=10.0)
    served.add(key(1), 1 << 20, now=5e6)  # clocks start anywhere
    assert served.measure_load(now=5e6 + 10).by_variant[key(1)] == pytest.approx(
        (1 << 19) * 0.0693147, rel=1e-6
    )
    assert served.measure_load(now=5e6 + 1000) == ShardLoad(0.0, {})


def test_thresholds_that_would_flap_are_refused() -> None:
    with pytest.raises(ValueError, match="drop_share"):
        ReplicationThresholds(copy_share=0.1, drop_share=0.1)
