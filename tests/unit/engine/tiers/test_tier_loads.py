"""Loads from a worker's own tiers: the same bits as from the store, which is asked for the rest.

As a program it decodes a value in Triton's interpreter, and prints whether it is what the CPU says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ragcache_core.identity.variant import (  # noqa: E402
    Codec,
    Miss,
    Precision,
    Provenance,
    Tier,
    VariantInfo,
)
from ragcache_engine.kv_cache.block_writer import BlockWriter  # noqa: E402
from ragcache_engine.kv_cache.incoming_value import EncodedValue, IncomingValue  # noqa: E402
from ragcache_engine.kv_cache.paged_cache import PagedCache  # noqa: E402
from ragcache_engine.kv_cache.value_tensors import decode, value_shape  # noqa: E402
from ragcache_engine.protocol.messages import (  # noqa: E402
    LoadJob,
    LoadOutcome,
    RecomputeJob,
    StepJobs,
    VariantSpan,
)
from ragcache_engine.tiers.local_tiers import LocalTiers, TierRead  # noqa: E402
from ragcache_engine.worker.fetcher import Fetcher  # noqa: E402
from ragcache_kv.codecs import encode_part  # noqa: E402
from ragcache_kv.rotation import KeyRotation, Pairing, Rope  # noqa: E402
from ragcache_kv.store_client.sharded import ShardedStore  # noqa: E402
from ragcache_kv.values.buffers import checksummed_parts  # noqa: E402
from ragcache_kv.values.layout import FORMAT, value_bytes  # noqa: E402
from ragcache_kv.values.stored_value import StoredValue  # noqa: E402
from ragcache_wire.settings import EngineSettings  # noqa: E402
from ragcache_wire.watched.members import FixedMembers  # noqa: E402
from tests.helpers.triton_program import as_a_program  # noqa: E402
from tests.unit.engine.worker.test_worker import (  # noqa: E402
    BLOCKS,
    SPACE,
    TIMEOUT_S,
    FakeCache,
    FakeStore,
    Worker,
    key,
    save_job,
    spans,
    until_put,
)

INT8 = Precision(Codec.INT8, Codec.INT8)
ROTATION = KeyRotation(Rope(4, 4, Pairing.HALVES, (1.0, 0.01)), "bfloat16")
MIB = 1 << 20


def config(**other: Any) -> EngineSettings:
    return EngineSettings(cachestore=FixedMembers(()), host_tier_bytes=MIB, **other)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(config())
    yield worker
    worker.store.gate.set()
    worker.side.close()


def job(wanted: tuple[VariantSpan, ...], name: str = "r", **other: Any) -> LoadJob:
    return LoadJob(name, wanted, 0, wanted[-1].end, BLOCKS, "tenant", **other)


def tiers_of(worker: Worker) -> LocalTiers:
    return worker.side._tiers


def settle(tiers: LocalTiers) -> None:
    tiers.settle()
    deadline = time.monotonic() + TIMEOUT_S
    while tiers._moving:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def load(worker: Worker, wanted: tuple[VariantSpan, ...], name: str = "r") -> LoadOutcome:
    outcome = worker.load(job(wanted, name))
    settle(tiers_of(worker))
    return outcome


@pytest.mark.parametrize("pool", ["host", "device"])
def test_what_was_loaded_once_is_loaded_again_while_the_store_is_silent(pool: str) -> None:
    settings = {"host_tier_bytes": 0, "device_pool_bytes": 0}
    settings[f"{pool}_{'tier' if pool == 'host' else 'pool'}_bytes"] = MIB
    worker = Worker(EngineSettings(cachestore=FixedMembers(()), **settings))  # type: ignore[arg-type]
    wanted = spans(10, 50, 131)
    tensors = worker.store.fill(wanted)
    load(worker, wanted)
    worker.cache.slots_written.clear()
    worker.store.gate.clear()
    worker.store.values.clear()
    outcome = load(worker, wanted, "again")
    assert (outcome.tokens, outcome.reason) == (131, "")
    assert outcome.num_bytes == value_bytes(SPACE, 131)
    assert outcome.values_by_tier == {pool: 3}
    assert outcome.bytes_by_tier == {pool: value_bytes(SPACE, 131)}
    assert len(worker.store.asked) == 1
    for span in wanted:
        read = worker.cache.read(BLOCKS, span.start, span.end)
        assert torch.equal(read, tensors[span.variant])
    deadline = time.monotonic() + TIMEOUT_S
    while worker.store.noted != [span.variant for span in wanted]:  # so that they stay hot there
        assert time.monotonic() < deadline
        time.sleep(0.001)
    counts = worker.side.take_counts()
    assert counts.values_by_tier == {"store": 3, pool: 3}
    assert set(counts.held_bytes) == {pool}
    tiers_of(worker).check()
    worker.store.gate.set()
    worker.side.close()


def test_the_store_is_asked_for_what_no_tier_has_and_for_nothing_else(worker: Worker) -> None:
    few, wanted = spans(10, 50, 90), spans(10, 50, 90, 131)
    tensors = worker.store.fill(wanted)
    load(worker, (few[0], few[2]))
    worker.cache.slots_written.clear()
    outcome = load(worker, wanted, "all")
    assert worker.store.asked[1:] == [[key(1), key(3)]]
    assert outcome.values_by_tier == {"host": 2, "store": 2}
    for span in wanted:
        read = worker.cache.read(BLOCKS, span.start, span.end)
        assert torch.equal(read, tensors[span.variant])


def test_what_was_there_before_a_silent_store_counts(worker: Worker) -> None:
    wanted = spans(70, 131)
    worker.store.fill(wanted)
    load(worker, wanted[:1])
    worker.store.outage_after = 0
    outcome = load(worker, wanted, "all")
    assert (outcome.tokens, outcome.missing_variant, outcome.reason) == (64, key(1), "store unavailable")


def test_only_the_tokens_asked_for_are_written(worker: Worker) -> None:
    wanted = spans(50, 131)
    worker.store.fill(wanted)
    load(worker, wanted)
    worker.cache.slots_written.clear()
    outcome = worker.load(LoadJob("again", wanted, 32, 130, BLOCKS, "tenant"))
    assert (outcome.tokens, outcome.values_by_tier) == (98, {"host": 2})
    written = set(worker.cache.slots_written)
    assert written == set(worker.cache.slots(BLOCKS, 32, 130).tolist())


def test_what_was_computed_here_is_not_asked_of_the_store(worker: Worker) -> None:
    wanted = spans(40)
    worker.store.fill(wanted)
    worker.load(job(wanted))
    worker.side.end_pass(StepJobs(saves=(save_job(5, 0, 20), save_job(6, 20, 40))))
    worker.side.begin_step(StepJobs())
    until_put(worker.store, 2)
    settle(tiers_of(worker))
    there = worker.cache.read(BLOCKS, 0, 40)
    worker.cache.slots_written.clear()
    again = (VariantSpan(key(5), 0, 20), VariantSpan(key(6), 20, 40))
    outcome = worker.load(job(again, "again"))
    assert outcome.values_by_tier == {"host": 2}
    assert len(worker.store.asked) == 1
    assert torch.equal(worker.cache.read(BLOCKS, 0, 40), there)


def test_a_load_that_is_cancelled_keeps_no_room(worker: Worker) -> None:
    wanted = spans(10, 50, 131)
    worker.store.fill(wanted)
    load(worker, wanted[:2])
    worker.store.gate.clear()
    worker.side.start_loads(StepJobs(loads=(job(wanted, "left"),)))
    worker.side.advance({"left"}, busy=False)
    assert "left" in worker.side.take_received()
    worker.store.gate.set()
    deadline = time.monotonic() + TIMEOUT_S
    while any(entry.readers for entry in tiers_of(worker)._entries.values()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
        tiers_of(worker).take_counts()
    tiers_of(worker).check()


def test_a_write_that_raises_keeps_no_room(worker: Worker) -> None:
    wanted = spans(10)
    worker.store.fill(wanted)
    load(worker, wanted)
    worker.cache.broken = True
    outcome = worker.load(job(wanted, "again"))
    assert (outcome.missing_variant, outcome.reason) == (key(0), "write failed")
    worker.side.advance((), busy=False)
    tiers_of(worker).check()
    assert not any(entry.readers for entry in tiers_of(worker)._entries.values())


def test_a_damaged_value_reaches_no_tier(worker: Worker) -> None:
    wanted = spans(40)
    worker.store.fill(wanted)
    stored = worker.store.values[key(0)]
    assert isinstance(stored, StoredValue)
    worker.store.values[key(0)] = replace(stored, value=stored.value[:-2])
    load(worker, wanted)
    assert tiers_of(worker).read(key(0), 40, 0, "tenant", exact=False) is None


# Chunks of other prompts.


def blend_of(*wanted: VariantSpan) -> LoadJob:
    recompute = RecomputeJob(0, (), (), (), 0, ())
    return LoadJob("blend", wanted, 0, wanted[-1].end, BLOCKS, "tenant", recompute)


class Fetching:
    """A fetcher over a fake store, and what it brings offered as a loader would."""

    def __init__(self, device: str = "cpu") -> None:
        self.worker = Worker(config())
        self.store, self.tiers = self.worker.store, tiers_of(self.worker)
        self.fetcher = Fetcher(
            cast("ShardedStore", self.store), SPACE, self.tiers, ROTATION, torch.device(device)
        )

    def fetch(self, wanted: LoadJob) -> list[IncomingValue]:
        arrivals = [arrival for _, arrival in self.fetcher.fetch([wanted], TIMEOUT_S)]
        self.tiers.offer(one.offer for one in arrivals if one.offer is not None)
        settle(self.tiers)
        return arrivals


@pytest.fixture
def fetching() -> Iterator[Fetching]:
    made = Fetching()
    yield made
    made.worker.side.close()


def held_as(precision: Precision, num_tokens: int, *, exact: bool = True) -> StoredValue:
    value = torch.randn(2, 2, num_tokens, 1, 4).bfloat16()
    layers = [layer.view(torch.uint8).numpy().reshape(-1) for layer in value]
    encoded = [encode_part(one, value_shape(SPACE), num_tokens, precision) for one in layers]
    raw = memoryview(np.concatenate(encoded))
    info = VariantInfo(num_tokens, len(raw), 0, Provenance(exact=exact), precision)
    parts = checksummed_parts(raw, [len(one) for one in encoded])
    return StoredValue(info, parts, value_shape(SPACE), FORMAT, raw, Tier.MEMORY)


@pytest.mark.parametrize("lossy", [True, False])
def test_what_is_not_exact_serves_blends_and_never_exact(fetching: Fetching, lossy: bool) -> None:
    span = VariantSpan(key(0), 0, 40)
    precision = INT8 if lossy else Precision()
    stored = held_as(precision, 40, exact=lossy)
    fetching.store.values[key(0)] = stored
    fetching.fetch(blend_of(span))
    (arrival,) = fetching.fetch(blend_of(span))
    assert arrival.came_from == "host"
    assert arrival.source is not None
    (piece,) = arrival.source.pieces(0, 40)
    expected = decode(stored, 40, SPACE)
    assert expected is not None
    assert torch.equal(piece, expected)

    fetching.store.values[key(0)] = Miss.OTHER_PRECISION
    (arrival,) = fetching.fetch(job((span,)))
    assert (arrival.source, arrival.reason) == (None, "other precision")
    # Nor the part of a blend that is exact.
    exact_head = replace(blend_of(span), recompute=RecomputeJob(20, (), (), (), 0, ()))
    (arrival,) = fetching.fetch(exact_head)
    assert (arrival.source, arrival.mended) == (None, False)
    # When it has been computed anew, that is what is kept.
    fetching.store.values[key(0)] = held_as(Precision(), 40)
    fetching.fetch(job((span,)))
    (arrival,) = fetching.fetch(job((span,)))
    assert arrival.came_from == "host"


def test_a_value_that_two_want_in_other_places_is_turned_for_each() -> None:
    """Where nobody keeps it, it is turned in place, unless another load has the same."""
    store, nothing_kept = FakeStore(), LocalTiers({}, "score")
    fetcher = Fetcher(
        cast("ShardedStore", store), SPACE, nothing_kept, ROTATION, torch.device("cpu")
    )
    [tensor] = [one.clone() for one in store.fill(spans(40)).values()]
    position_shift = (7, 90, 0)
    jobs = [blend_of(VariantSpan(key(0), moved, moved + 40, base_position=0)) for moved in position_shift]
    found = list(fetcher.fetch(jobs, TIMEOUT_S))
    assert [place for place, _ in found] == [0, 1, 2]
    assert store.asked == [[key(0)]]
    for (_, arrival), moved in zip(found, position_shift, strict=True):
        assert arrival.source is not None
        (piece,) = arrival.source.pieces(0, 40)
        expected = tensor.clone()
        if moved:
            ROTATION.rotate_part(expected, moved)
        assert torch.equal(piece, expected)
    nothing_kept.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_keys_that_have_moved_are_turned_and_what_is_kept_stays(device: str) -> None:
    """As if the model were on a GPU, too: the writer turns then, be it on whatever device."""
    fetching = Fetching(device)
    tensors = fetching.store.fill(spans(40))
    cache = FakeCache()
    writer = BlockWriter(cast("PagedCache", cache), ROTATION)
    for start, came_from in ((60, "store"), (70, "host"), (0, "host"), (91, "host")):
        span = VariantSpan(key(0), start, start + 40, base_position=0)
        wanted = blend_of(span)
        (arrival,) = fetching.fetch(wanted)
        assert arrival.came_from == came_from
        assert arrival.turn == (start if device == "cuda" else 0)
        writer.write(wanted, arrival, start + 3, start + 40)
        expected = tensors[key(0)].clone()
        if start:
            ROTATION.rotate_part(expected, start)
        assert torch.equal(cache.read(BLOCKS, start + 3, start + 40), expected[:, :, 3:])
    writer.let_go()
    del arrival
    fetching.tiers.check()
    fetching.worker.side.close()


def test_a_value_that_was_computed_elsewhere_is_asked_for(fetching: Fetching) -> None:
    fetching.store.fill(spans(40))
    moved = VariantSpan(key(0), 60, 100, base_position=0)
    fetching.fetch(blend_of(moved))
    (arrival,) = fetching.fetch(blend_of(replace(moved, base_position=7)))
    assert (arrival.source, arrival.reason, arrival.mended) == (None, "other position", True)


def test_a_hole_between_values_of_a_tier_is_mended(fetching: Fetching) -> None:
    wanted = spans(10, 50, 131)
    fetching.store.fill(wanted)
    fetching.fetch(blend_of(wanted[0], wanted[2]))
    fetching.store.values.clear()
    found = fetching.fetch(blend_of(*wanted))
    assert [one.source is not None for one in found] == [True, False, True]
    assert isinstance(found[2].source, TierRead)


def decoded_alike() -> bool:
    stored = held_as(Precision(Codec.INT8, Codec.INT4), 37)
    (piece,) = EncodedValue(stored, SPACE, torch.device("cpu")).pieces(5, 37)
    expected = decode(stored, 37, SPACE)
    assert expected is not None
    return torch.equal(piece, expected[:, :, 5:])


def test_what_a_gpu_decodes_is_what_the_processor_does() -> None:
    assert as_a_program(__file__, TRITON_INTERPRET="1") is True


if __name__ == "__main__":
    print(json.dumps(decoded_alike()))
