"""Loads from a worker's own tiers are bit-identical to those from the store.

As a program, this module decodes a value in Triton's interpreter and compares it with the CPU.
"""

from __future__ import annotations

import json
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
    PrecisionUse,
    Provenance,
    Tier,
    VariantInfo,
)
from ragcache_core.store_api import ReportedUses  # noqa: E402
from ragcache_engine.kv_cache.block_writer import BlockWriter, PlacedValue  # noqa: E402
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
from tests.kit.triton_program import as_a_program  # noqa: E402
from tests.kit.wait import wait_until  # noqa: E402
from tests.kit.worker import (  # noqa: E402
    BLOCKS,
    SPACE,
    TIMEOUT_S,
    FakePagedCache,
    FakeStoreClient,
    WorkerHarness,
    key,
    save_job,
    spans,
    wait_for_puts,
)

INT8 = Precision(Codec.INT8, Codec.INT8)
ROTATION = KeyRotation(Rope(4, 4, Pairing.HALVES, (1.0, 0.01)), "bfloat16")
MIB = 1 << 20


def settings_with(**other: Any) -> EngineSettings:
    return EngineSettings(cachestore=FixedMembers(()), host_tier_bytes=MIB, **other)


@pytest.fixture
def worker() -> Iterator[WorkerHarness]:
    worker = WorkerHarness(settings_with())
    yield worker
    worker.store.get_gate.set()
    worker.connector.close()


def job(wanted: tuple[VariantSpan, ...], name: str = "r", **other: Any) -> LoadJob:
    return LoadJob(name, wanted, 0, wanted[-1].end, BLOCKS, "tenant", **other)


def tiers_of(worker: WorkerHarness) -> LocalTiers:
    return worker.connector._tiers


def rebalance(tiers: LocalTiers) -> None:
    tiers.start_rebalance()
    wait_until(lambda: not tiers._rebalancing)


def load(worker: WorkerHarness, wanted: tuple[VariantSpan, ...], name: str = "r") -> LoadOutcome:
    outcome = worker.load(job(wanted, name))
    rebalance(tiers_of(worker))
    return outcome


@pytest.mark.parametrize("pool", ["host", "device"])
def test_a_loaded_value_is_loaded_again_while_the_store_is_silent(pool: str) -> None:
    settings = {"host_tier_bytes": 0, "device_pool_bytes": 0}
    settings[f"{pool}_{'tier' if pool == 'host' else 'pool'}_bytes"] = MIB
    worker = WorkerHarness(EngineSettings(cachestore=FixedMembers(()), **settings))  # type: ignore[arg-type]
    wanted = spans(10, 50, 131)
    tensors = worker.store.fill(wanted)
    load(worker, wanted)
    worker.cache.slots_written.clear()
    worker.store.get_gate.clear()
    worker.store.values.clear()
    outcome = load(worker, wanted, "again")
    assert (outcome.tokens, outcome.reason) == (131, "")
    assert outcome.num_bytes == value_bytes(SPACE, 131)
    assert outcome.values_by_tier == {pool: 3}
    assert outcome.bytes_by_tier == {pool: value_bytes(SPACE, 131)}
    assert len(worker.store.requested) == 1
    for span in wanted:
        read = worker.cache.read(BLOCKS, span.start, span.end)
        assert torch.equal(read, tensors[span.variant])
    # So that they stay hot in the store.
    wait_until(lambda: worker.store.reported == [ReportedUses(span.variant) for span in wanted])
    assert set(worker.connector.take_counts().held_bytes) == {pool}
    tiers_of(worker).check()
    worker.store.get_gate.set()
    worker.connector.close()


def test_the_store_is_asked_only_for_values_that_no_tier_has(worker: WorkerHarness) -> None:
    few, wanted = spans(10, 50, 90), spans(10, 50, 90, 131)
    tensors = worker.store.fill(wanted)
    load(worker, (few[0], few[2]))
    worker.cache.slots_written.clear()
    outcome = load(worker, wanted, "all")
    assert worker.store.requested[1:] == [[key(1), key(3)]]
    assert outcome.values_by_tier == {"host": 2, "store": 2}
    for span in wanted:
        read = worker.cache.read(BLOCKS, span.start, span.end)
        assert torch.equal(read, tensors[span.variant])


def test_tier_values_before_an_outage_count(worker: WorkerHarness) -> None:
    wanted = spans(70, 131)
    worker.store.fill(wanted)
    load(worker, wanted[:1])
    worker.store.outage_after = 0
    outcome = load(worker, wanted, "all")
    assert (outcome.tokens, outcome.missing_variant, outcome.reason) == (
        64,
        key(1),
        "store unavailable",
    )


def test_only_the_requested_tokens_of_tier_values_are_written(worker: WorkerHarness) -> None:
    wanted = spans(50, 131)
    worker.store.fill(wanted)
    load(worker, wanted)
    worker.cache.slots_written.clear()
    outcome = worker.load(LoadJob("again", wanted, 32, 130, BLOCKS, "tenant"))
    assert (outcome.tokens, outcome.values_by_tier) == (98, {"host": 2})
    written = set(worker.cache.slots_written)
    assert written == set(worker.cache.slots(BLOCKS, 32, 130).tolist())


def test_the_store_is_not_asked_for_values_computed_here(worker: WorkerHarness) -> None:
    wanted = spans(40)
    worker.store.fill(wanted)
    worker.load(job(wanted))
    worker.connector.end_pass(StepJobs(saves=(save_job(5, 0, 20), save_job(6, 20, 40))))
    worker.connector.begin_step(StepJobs())
    wait_for_puts(worker.store, 2)
    rebalance(tiers_of(worker))
    there = worker.cache.read(BLOCKS, 0, 40)
    worker.cache.slots_written.clear()
    again = (VariantSpan(key(5), 0, 20), VariantSpan(key(6), 20, 40))
    outcome = worker.load(job(again, "again"))
    assert outcome.values_by_tier == {"host": 2}
    assert len(worker.store.requested) == 1
    assert torch.equal(worker.cache.read(BLOCKS, 0, 40), there)


def test_a_cancelled_load_keeps_no_pages(worker: WorkerHarness) -> None:
    wanted = spans(10, 50, 131)
    worker.store.fill(wanted)
    load(worker, wanted[:2])
    worker.store.get_gate.clear()
    worker.connector.start_loads(StepJobs(loads=(job(wanted, "left"),)))
    worker.connector.advance({"left"}, busy=False)
    assert "left" in worker.connector.take_received()
    worker.store.get_gate.set()

    def has_no_readers() -> bool:
        tiers_of(worker).take_counts()
        return not any(value.readers for value in tiers_of(worker)._values.values())

    wait_until(has_no_readers)
    tiers_of(worker).check()


def test_a_write_that_raises_keeps_no_pages(worker: WorkerHarness) -> None:
    wanted = spans(10)
    worker.store.fill(wanted)
    load(worker, wanted)
    worker.cache.broken = True
    outcome = worker.load(job(wanted, "again"))
    assert (outcome.missing_variant, outcome.reason) == (key(0), "write failed")
    worker.connector.advance((), busy=False)
    tiers_of(worker).check()
    assert not any(value.readers for value in tiers_of(worker)._values.values())


def test_a_damaged_value_reaches_no_tier(worker: WorkerHarness) -> None:
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


class FetcherHarness:
    """A fetcher over a fake store. It offers the values to the tiers as a loader does."""

    def __init__(self, device: str = "cpu") -> None:
        self.worker = WorkerHarness(settings_with())
        self.store, self.tiers = self.worker.store, tiers_of(self.worker)
        self.fetcher = Fetcher(
            cast("ShardedStore", self.store), SPACE, self.tiers, ROTATION, torch.device(device)
        )

    def fetch(self, wanted: LoadJob) -> list[IncomingValue]:
        values = [value for _, value in self.fetcher.fetch([wanted], TIMEOUT_S)]
        self.tiers.offer(one.offer for one in values if one.offer is not None)
        rebalance(self.tiers)
        return values


@pytest.fixture
def fetcher() -> Iterator[FetcherHarness]:
    made = FetcherHarness()
    yield made
    made.worker.connector.close()


def test_a_lossy_value_is_blended_only_if_the_plan_allows_its_precision(
    fetcher: FetcherHarness,
) -> None:
    span = VariantSpan(key(0), 0, 40)
    fetcher.store.values[key(0)] = stored_with(INT8, 40)
    for use, tiers in (
        (PrecisionUse(), []),
        (PrecisionUse(lossy=True), ["store"]),
        (PrecisionUse(lossy=True), ["host"]),
        (PrecisionUse(), []),  # neither from the host tier nor from the store
        (PrecisionUse(rounding=INT8), ["store"]),
    ):
        values = fetcher.fetch(replace(blend_of(span), precision=use))
        assert [one.tier for one in values if one.source is not None] == tiers


def stored_with(precision: Precision, num_tokens: int, *, exact: bool = True) -> StoredValue:
    generator = torch.Generator().manual_seed(num_tokens)
    value = torch.randn(2, 2, num_tokens, 1, 4, generator=generator).bfloat16()
    layers = [layer.view(torch.uint8).numpy().reshape(-1) for layer in value]
    encoded = [encode_part(one, value_shape(SPACE), num_tokens, precision) for one in layers]
    raw = np.concatenate(encoded).data
    info = VariantInfo(num_tokens, len(raw), 0, Provenance(exact=exact), precision)
    parts = checksummed_parts(raw, [len(one) for one in encoded])
    return StoredValue(info, parts, value_shape(SPACE), FORMAT, raw, Tier.MEMORY)


@pytest.mark.parametrize("lossy", [True, False])
def test_an_approximate_value_serves_blend_and_never_exact(
    fetcher: FetcherHarness, lossy: bool
) -> None:
    span = VariantSpan(key(0), 0, 40)
    precision = INT8 if lossy else Precision()
    stored = stored_with(precision, 40, exact=lossy)
    fetcher.store.values[key(0)] = stored
    blend = replace(blend_of(span), precision=PrecisionUse(lossy=lossy))
    fetcher.fetch(blend)
    (value,) = fetcher.fetch(blend)
    assert value.tier == "host"
    assert value.source is not None
    (piece,) = value.source.pieces(0, 40)
    expected = decode(stored, 40, SPACE)
    assert expected is not None
    assert torch.equal(piece, expected)

    fetcher.store.values[key(0)] = Miss.OTHER_PRECISION
    (value,) = fetcher.fetch(job((span,)))
    assert (value.source, value.reason) == (None, "other precision")
    # Nor is it used in the exact part of a blend.
    exact_head = replace(blend_of(span), recompute=RecomputeJob(20, (), (), (), 0, ()))
    (value,) = fetcher.fetch(exact_head)
    assert (value.source, value.can_recompute) == (None, False)
    # A recomputed value replaces it in the tier.
    fetcher.store.values[key(0)] = stored_with(Precision(), 40)
    fetcher.fetch(job((span,)))
    (value,) = fetcher.fetch(job((span,)))
    assert value.tier == "host"


def test_a_value_at_two_positions_is_rotated_for_each() -> None:
    """Without a tier the keys are rotated in place, unless another load uses the same value."""
    store, no_tiers = FakeStoreClient(), LocalTiers({}, "score")
    fetcher = Fetcher(cast("ShardedStore", store), SPACE, no_tiers, ROTATION, torch.device("cpu"))
    [tensor] = [one.clone() for one in store.fill(spans(40)).values()]
    position_shift = (7, 90, 0)
    jobs = [
        blend_of(VariantSpan(key(0), moved, moved + 40, base_position=0))
        for moved in position_shift
    ]
    found = list(fetcher.fetch(jobs, TIMEOUT_S))
    assert [index for index, _ in found] == [0, 1, 2]
    assert store.requested == [[key(0)]]
    for (_, value), moved in zip(found, position_shift, strict=True):
        assert value.source is not None
        (piece,) = value.source.pieces(0, 40)
        expected = tensor.clone()
        if moved:
            ROTATION.rotate_part(expected, moved)
        assert torch.equal(piece, expected)
    no_tiers.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_moved_keys_are_rotated_and_the_tier_value_stays(device: str) -> None:
    """With a model on a GPU, the writer rotates the keys."""
    fetcher = FetcherHarness(device)
    tensors = fetcher.store.fill(spans(40))
    cache = FakePagedCache()
    writer = BlockWriter(cast("PagedCache", cache), ROTATION)
    for start, tier in ((60, "store"), (70, "host"), (0, "host"), (91, "host")):
        span = VariantSpan(key(0), start, start + 40, base_position=0)
        wanted = blend_of(span)
        (value,) = fetcher.fetch(wanted)
        assert value.tier == tier
        assert value.rotate_by == (start if device == "cuda" else 0)
        writer.write(wanted, [PlacedValue(value, start + 3, start + 40)])
        expected = tensors[key(0)].clone()
        if start:
            ROTATION.rotate_part(expected, start)
        assert torch.equal(cache.read(BLOCKS, start + 3, start + 40), expected[:, :, 3:])
    writer.release_read_values()
    del value
    fetcher.tiers.check()
    fetcher.worker.connector.close()


def test_a_value_with_another_base_position_comes_from_the_store(fetcher: FetcherHarness) -> None:
    fetcher.store.fill(spans(40))
    moved = VariantSpan(key(0), 60, 100, base_position=0)
    fetcher.fetch(blend_of(moved))
    (value,) = fetcher.fetch(blend_of(replace(moved, base_position=7)))
    assert (value.source, value.reason, value.can_recompute) == (None, "other position", True)


def test_a_missing_chunk_between_tier_values_is_recomputed(fetcher: FetcherHarness) -> None:
    wanted = spans(10, 50, 131)
    fetcher.store.fill(wanted)
    fetcher.fetch(blend_of(wanted[0], wanted[2]))
    fetcher.store.values.clear()
    found = fetcher.fetch(blend_of(*wanted))
    assert [one.source is not None for one in found] == [True, False, True]
    assert isinstance(found[2].source, TierRead)


def is_decoded_alike() -> bool:
    stored = stored_with(Precision(Codec.INT8, Codec.INT4), 37)
    (piece,) = EncodedValue(stored, SPACE, torch.device("cpu")).pieces(5, 37)
    expected = decode(stored, 37, SPACE)
    assert expected is not None
    return torch.equal(piece, expected[:, :, 5:])


def test_a_gpu_decodes_as_the_cpu_does() -> None:
    assert as_a_program(__file__, TRITON_INTERPRET="1") is True


if __name__ == "__main__":
    print(json.dumps(is_decoded_alike()))
