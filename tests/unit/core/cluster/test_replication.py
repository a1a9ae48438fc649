"""Hot variants of a busy shard are copied, cool ones dropped, and nothing flaps."""

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

BUSY = ReplicationThresholds(copy_share=0.2, drop_share=0.05, min_bytes_per_s=1000.0, max_copies=2)


def key(number: int) -> VariantKey:
    return VariantKey(number.to_bytes(16, "big"), bytes(16))


def load(**rates: float) -> ShardLoad:
    by_variant = {key(int(name[1:])): rate for name, rate in rates.items()}
    return ShardLoad(sum(rates.values()), by_variant)


def test_variants_with_a_large_share_are_copied_most_served_first() -> None:
    found = decide_replication(load(v1=300, v2=500, v3=40, v4=160), frozenset(), BUSY)
    assert found == ReplicationChanges(copy=(key(2), key(1)))


def test_a_shard_that_is_not_busy_copies_nothing() -> None:
    assert decide_replication(load(v1=900), frozenset(), BUSY) == ReplicationChanges()
    assert decide_replication(load(), frozenset(), BUSY) == ReplicationChanges()


def test_between_the_thresholds_a_copy_stays() -> None:
    replicated = frozenset({key(1)})
    assert (
        decide_replication(load(v1=100, v2=190, v3=190, v4=190, v5=190, v6=190), replicated, BUSY)
        == ReplicationChanges()
    )


def test_a_variant_with_a_small_share_loses_its_copy() -> None:
    assert decide_replication(load(v1=10, v2=990), frozenset({key(1)}), BUSY).drop == (key(1),)
    assert decide_replication(load(), frozenset({key(1)}), BUSY).drop == (key(1),)


def test_there_are_never_more_copies_than_allowed() -> None:
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
def test_a_decision_is_stable_once_it_is_applied(
    load: ShardLoad, replicated: frozenset[VariantKey]
) -> None:
    first = decide_replication(load, replicated, BUSY)
    assert set(first.drop) <= replicated
    assert not set(first.copy) & replicated
    after = (replicated - set(first.drop)) | set(first.copy)
    assert decide_replication(load, after, BUSY) == ReplicationChanges()


@given(loads, st.frozensets(keys), st.randoms())
def test_the_order_of_variants_does_not_matter(
    load: ShardLoad, replicated: frozenset[VariantKey], random: object
) -> None:
    rates = list(load.by_variant.items())
    random.shuffle(rates)  # type: ignore[attr-defined]
    assert decide_replication(
        ShardLoad(load.bytes_per_s, dict(rates)), replicated, BUSY
    ) == decide_replication(load, replicated, BUSY)


def test_a_constant_stream_is_measured_exactly() -> None:
    served = ServedBytes(half_life_s=10.0)
    for tick in range(10_000):
        served.add(key(tick % 2), 100, now=tick / 10)
    found = served.measure_load(now=1000.0)
    assert found.bytes_per_s == pytest.approx(1000, rel=0.01)
    assert found.by_variant[key(0)] == pytest.approx(500, rel=0.02)


def test_variants_that_are_no_longer_served_are_forgotten() -> None:
    served = ServedBytes(half_life_s=10.0)
    served.add(key(1), 1 << 20, now=5e6)  # clocks start anywhere
    assert served.measure_load(now=5e6 + 10).by_variant[key(1)] == pytest.approx(
        (1 << 19) * 0.0693147, rel=1e-6
    )
    assert served.measure_load(now=5e6 + 1000) == ShardLoad(0.0, {})


def test_thresholds_without_hysteresis_are_rejected() -> None:
    with pytest.raises(ValueError, match="drop_share"):
        ReplicationThresholds(copy_share=0.1, drop_share=0.1)
