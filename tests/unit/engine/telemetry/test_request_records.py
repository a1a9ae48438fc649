"""The engine's own record of its requests."""

from __future__ import annotations

import pytest

from harness.processes import free_port
from ragcache_core.cost.load_or_compute import PredictedTime, ReuseCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import NotFound, RagCacheError
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Tier
from ragcache_engine.telemetry.request_records import (
    CAPACITY,
    RequestRecord,
    RequestRecords,
    serve_records,
)
from ragcache_engine.telemetry.segment_outcomes import SpanSource
from ragcache_wire.clients import engine_client
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.v1 import engine_pb2 as pb

LIMIT_S = 60.0
"""Deadline of calls that are answered, however slow the machine is."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "RECORD_TIMEOUT_S", LIMIT_S)


async def test_a_record_is_served_and_an_unknown_one_is_an_error() -> None:
    records = RequestRecords()
    address = f"127.0.0.1:{free_port()}"
    server = serve_records(records, ReuseCosts(), address)
    client = EngineClient(address)
    records.put(
        "r",
        RequestRecord(
            queue_s=0.5, loaded_tokens=7, loaded_bytes=70, missing_chunks=(2, 5), miss="corrupt"
        ),
    )
    records.put("slow", RequestRecord(miss="never stored", compute_is_faster=True))
    assert (await client.request_record("slow", LIMIT_S)).miss == "computing is faster"
    record = await client.request_record("r", LIMIT_S)
    assert (record.queue_s, record.loaded_tokens, record.miss) == (0.5, 7, "corrupt")
    assert list(record.missing_chunks) == [2, 5]
    with pytest.raises(RagCacheError) as caught:
        await client.request_record("other", LIMIT_S)
    assert isinstance(caught.value, NotFound)
    await client.close()
    server.stop(None).wait()


async def test_a_record_serves_the_outcome_of_each_segment() -> None:
    records = RequestRecords()
    address = f"127.0.0.1:{free_port()}"
    server = serve_records(records, ReuseCosts(), address)
    client = EngineClient(address)
    variant = VariantKey(bytes(16), b"p" * 16)
    source = SpanSource(variant, Tier.DISK, 512, base_position=3, fix_overhead=0.25)
    segments = (
        pb.SegmentRecord(end=10, cached_tokens=10),
        pb.SegmentRecord(start=10, end=30, loaded_tokens=20, source=source.to_message()),
        pb.SegmentRecord(start=30, end=50, reason="evicted"),
    )
    records.put("r", RequestRecord(segments=segments))
    cached, loaded, computed = (await client.request_record("r", LIMIT_S)).segments
    assert (cached.cached_tokens, cached.HasField("source")) == (10, False)
    assert (loaded.start, loaded.end, loaded.loaded_tokens) == (10, 30, 20)
    assert (loaded.source.tier, loaded.source.num_bytes) == ("disk", 512)
    assert (loaded.source.base_position, loaded.source.fix_overhead) == (3, 0.25)
    assert loaded.source.prefix == variant.prefix
    assert computed.reason == "evicted"
    await client.close()
    server.stop(None).wait()


async def test_costs_of_prefills_and_loads_are_served() -> None:
    costs = ReuseCosts()
    address = f"127.0.0.1:{free_port()}"
    server = serve_records(RequestRecords(), costs, address)
    client = EngineClient(address)
    unknown = await client.costs()
    assert not unknown.HasField("prefill")
    assert not unknown.loads
    profile = PrefillProfile((0, 64), (16, 256), ((0.1, 0.2), (0.3, 0.4)), 2048)
    costs.use_profile(profile)
    for number in range(1, 6):
        costs.observe_load({Tier.DISK: 1000 * number}, 0.01 + 1e-5 * 1000 * number)
    known = await client.costs()
    assert list(known.prefill.seconds) == [0.1, 0.2, 0.3, 0.4]
    assert (list(known.prefill.cached), list(known.prefill.computed)) == ([0, 64], [16, 256])
    assert known.prefill.pass_tokens == 2048
    assert known.correction == pytest.approx(1.0)
    [disk] = known.loads
    assert disk.tier == "disk"
    assert (disk.latency_s, disk.bytes_per_s) == (pytest.approx(0.01), pytest.approx(1e5))
    await client.close()
    server.stop(None).wait()


def test_tokens_lost_by_a_preemption_do_not_count() -> None:
    record = RequestRecord()
    record.begin_load(30)
    record.loaded_tokens, record.blended_tokens, record.recomputed_tokens = 100, 60, 20
    record.loaded_bytes = 4000
    record.count_local(140)
    assert (record.local_tokens, record.loaded_tokens) == (40, 100)
    assert (record.blended_tokens, record.recomputed_tokens) == (60, 20)
    record.count_local(80)
    assert (record.local_tokens, record.loaded_tokens) == (30, 50)
    assert (record.blended_tokens, record.recomputed_tokens) == (10, 10)
    record.count_local(20)
    assert (record.local_tokens, record.loaded_tokens, record.loaded_bytes) == (20, 0, 0)
    assert (record.blended_tokens, record.recomputed_tokens) == (0, 0)


def test_the_oldest_records_are_dropped() -> None:
    records = RequestRecords()
    for number in range(CAPACITY + 2):
        records.put(str(number), RequestRecord())
    assert records.get("0") is None
    assert records.get("1") is None
    assert records.get("2") is not None


def test_each_stage_is_compared_with_its_prediction() -> None:
    record = RequestRecord(
        load_s=0.3, prefill_s=0.1, prompt_tokens=1000, recompute_s=0.25, select_s=0.05
    )
    assert record.prediction_ratios() == {}
    record.predicted = PredictedTime(load_s=0.1, select_s=0.0, passes_s=0.3)
    assert record.prediction_ratios() == {
        "load": pytest.approx(0.5),
        "passes": pytest.approx(1.0),
        "total": pytest.approx(1.0),
    }


def test_the_time_of_a_joint_pass_is_divided_by_tokens() -> None:
    record = RequestRecord(
        load_s=0.1, prefill_s=0.4, prompt_tokens=1000, loaded_tokens=900, joint_tokens=300
    )
    record.end_prefill()
    assert record.recompute_s == pytest.approx(0.3)
    assert record.load_s == pytest.approx(0.4)
    assert record.prefill_s == pytest.approx(0.1)
    record.end_prefill()
    assert record.recompute_s == pytest.approx(0.3), "once"
