"""Telemetry: metrics and spans as a collector receives them, and nothing without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.otlp import collector
from ragcache_cachestore.telemetry.exporter import Telemetry
from ragcache_core.identity.variant import Miss, Tier
from ragcache_core.store_api import Ack, PutOutcome
from ragcache_wire.telemetry import metric_registry
from ragcache_wire.tracing import Headers
from ragcache_wire.v1 import cachestore_pb2 as pb
from tests.kit.clock import ManualClock

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
METADATA: Headers = [
    ("user-agent", "grpc-python"),
    ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),
    ("blob-bin", b"\0"),
]
LEVELS = pb.StatsReply(
    variants=3,
    memory_bytes=10,
    memory_capacity_bytes=100,
    disk_bytes=20,
    disk_capacity_bytes=200,
    leases=1,
    tombstones=2,
    unwritten=4,
    connections=5,
    connections_evicted=6,
    connections_refused=7,
    bytes_by_precision={"native": 15, "int8/int4": 5},
    score_histogram=[0, 2, 1],
)


def value(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    return telemetry.collectors.get_sample_value(f"ragcache_store_{name}", labels)


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


def test_events_are_counted_by_their_attributes(telemetry: Telemetry) -> None:
    telemetry.hit(Tier.MEMORY, "shared", 100, 0.001)
    telemetry.hit(Tier.MEMORY, "shared", 50, 0.003)
    telemetry.hit(Tier.DISK, "socket", 7, 0.1)
    telemetry.miss(Miss.EVICTED)
    telemetry.miss(Miss.NEVER_STORED)
    telemetry.miss(Miss.EVICTED)
    telemetry.put(PutOutcome.STORED, Ack.DURABLE, "grpc", 11, 0.2)
    telemetry.put(PutOutcome.DELETED, Ack.ACCEPTED, "grpc", 12, 0.01)
    telemetry.evicted(Tier.MEMORY, "pgdsf", 13)
    telemetry.deleted(4)
    assert value(telemetry, "hits_total", tier="memory", transport="shared") == 2
    assert value(telemetry, "read_size_bytes_total", tier="memory", transport="shared") == 150
    assert value(telemetry, "hits_total", tier="disk", transport="socket") == 1
    assert value(telemetry, "misses_total", reason="evicted") == 2
    assert value(telemetry, "misses_total", reason="never_stored") == 1
    assert value(telemetry, "puts_total", outcome="stored", ack="durable", transport="grpc") == 1
    assert value(telemetry, "write_size_bytes_total", outcome="deleted", transport="grpc") == 12
    assert value(telemetry, "evictions_total", tier="memory", policy="pgdsf") == 1
    assert value(telemetry, "evictions_size_bytes_total", tier="memory", policy="pgdsf") == 13
    assert value(telemetry, "deletions_total") == 4


def test_histograms_separate_microseconds_from_seconds(telemetry: Telemetry) -> None:
    for seconds in (0.00002, 0.0003, 5.0):
        telemetry.hit(Tier.MEMORY, "shared", 1, seconds)
    where = {"tier": "memory", "transport": "shared"}
    assert value(telemetry, "read_duration_seconds_count", **where) == 3
    assert value(telemetry, "read_duration_seconds_sum", **where) == pytest.approx(5.00032)
    below = [
        value(telemetry, "read_duration_seconds_bucket", **where, le=bound)
        for bound in ("5e-05", "0.0005", "2.5", "10.0")
    ]
    assert below == [1, 2, 2, 3]


def test_levels_are_read_when_the_metrics_are(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    clock = ManualClock(1000.0)
    monkeypatch.setattr(metric_registry, "time", SimpleNamespace(monotonic=clock))

    def read() -> pb.StatsReply:
        asked.append(1)
        return LEVELS

    telemetry.observe(read)
    assert not asked
    assert value(telemetry, "used_bytes", tier="disk") == 20
    assert value(telemetry, "capacity_bytes", tier="memory") == 100
    assert value(telemetry, "variants") == 3
    assert value(telemetry, "leases") == 1
    assert value(telemetry, "tombstones") == 2
    assert value(telemetry, "unwritten") == 4
    assert value(telemetry, "connections") == 5
    assert value(telemetry, "connections_ended_total", reason="evicted") == 6
    assert value(telemetry, "connections_ended_total", reason="refused") == 7
    assert value(telemetry, "precision_bytes", precision="int8/int4") == 5
    assert [value(telemetry, "score", decade=str(decade)) for decade in range(3)] == [0, 2, 1]
    # Readers within a second share what was read.
    assert len(asked) == 1
    clock.now += 2.0
    assert value(telemetry, "variants") == 3
    assert len(asked) == 2


def test_close_exports_metrics_and_spans() -> None:
    with collector() as receiver:
        telemetry = Telemetry.start(f"{receiver.url}/", "store-0")
        telemetry.observe(lambda: LEVELS)
        telemetry.hit(Tier.DISK, "socket", 1024, 0.02)
        with telemetry.span("get", METADATA):
            pass
        telemetry.close()
    assert receiver.bodies.keys() == {"/v1/metrics", "/v1/traces"}
    [of_resource] = receiver.metrics()[-1].resource_metrics
    resource = {a.key: a.value.string_value for a in of_resource.resource.attributes}
    assert resource["service.name"] == "ragcache-cachestore"
    assert resource["service.instance.id"] == "store-0"
    [of_scope] = of_resource.scope_metrics
    by_name = {metric.name: metric for metric in of_scope.metrics}
    # Every tier and transport has a point; those without a hit have zero.
    [hits] = [one for one in by_name["ragcache.store.hits"].sum.data_points if one.as_int]
    assert hits.as_int == 1
    assert {a.key: a.value.string_value for a in hits.attributes} == {
        "tier": "disk",
        "transport": "socket",
    }
    assert len(by_name["ragcache.store.used"].gauge.data_points) == 2
    durations = by_name["ragcache.store.read.duration"].histogram.data_points
    [reads] = [one for one in durations if one.count]
    assert (reads.count, reads.sum) == (1, 0.02)
    assert reads.bucket_counts[list(reads.explicit_bounds).index(0.025)] == 1
    [span] = receiver.spans()
    assert (span.name, span.trace_id.hex()) == ("get", TRACE_ID)
