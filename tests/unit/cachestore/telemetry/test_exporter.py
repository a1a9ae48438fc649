"""Telemetry: metrics and spans as a collector receives them, and nothing without one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from harness.otlp import collector
from harness.processes import free_port
from ragcache_cachestore.telemetry.exporter import Telemetry
from ragcache_core.identity.variant import Miss, Tier
from ragcache_core.store_api import Ack, PutOutcome
from ragcache_wire.telemetry import metric_registry
from ragcache_wire.tracing import Headers, Tracer
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


@dataclass
class RecordedTelemetry:
    """Telemetry that keeps its spans in memory."""

    spans: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        tracer = Tracer(tracers, "test", exports_errors=True)
        self.telemetry = Telemetry(tracer)

    def value(self, name: str, **labels: str) -> float | None:
        sample = f"ragcache_store_{name}"
        return self.telemetry.collectors.get_sample_value(sample, labels)


@pytest.fixture
def kept() -> Iterator[RecordedTelemetry]:
    kept = RecordedTelemetry()
    yield kept
    kept.telemetry.close()


def test_events_are_counted_by_their_attributes(kept: RecordedTelemetry) -> None:
    telemetry = kept.telemetry
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
    assert kept.value("hits_total", tier="memory", transport="shared") == 2
    assert kept.value("read_size_bytes_total", tier="memory", transport="shared") == 150
    assert kept.value("hits_total", tier="disk", transport="socket") == 1
    assert kept.value("misses_total", reason="evicted") == 2
    assert kept.value("misses_total", reason="never_stored") == 1
    assert kept.value("puts_total", outcome="stored", ack="durable", transport="grpc") == 1
    assert kept.value("write_size_bytes_total", outcome="deleted", transport="grpc") == 12
    assert kept.value("evictions_total", tier="memory", policy="pgdsf") == 1
    assert kept.value("evictions_size_bytes_total", tier="memory", policy="pgdsf") == 13
    assert kept.value("deletions_total") == 4


def test_histograms_separate_microseconds_from_seconds(kept: RecordedTelemetry) -> None:
    for seconds in (0.00002, 0.0003, 5.0):
        kept.telemetry.hit(Tier.MEMORY, "shared", 1, seconds)
    where = {"tier": "memory", "transport": "shared"}
    assert kept.value("read_duration_seconds_count", **where) == 3
    assert kept.value("read_duration_seconds_sum", **where) == pytest.approx(5.00032)
    below = [
        kept.value("read_duration_seconds_bucket", **where, le=bound)
        for bound in ("5e-05", "0.0005", "2.5", "10.0")
    ]
    assert below == [1, 2, 2, 3]


def test_levels_are_read_when_the_metrics_are(
    kept: RecordedTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    clock = ManualClock(1000.0)
    monkeypatch.setattr(metric_registry, "time", SimpleNamespace(monotonic=clock))

    def read() -> pb.StatsReply:
        asked.append(1)
        return LEVELS

    kept.telemetry.observe(read)
    assert not asked
    assert kept.value("used_bytes", tier="disk") == 20
    assert kept.value("capacity_bytes", tier="memory") == 100
    assert kept.value("variants") == 3
    assert kept.value("leases") == 1
    assert kept.value("tombstones") == 2
    assert kept.value("unwritten") == 4
    assert kept.value("connections") == 5
    assert kept.value("connections_ended_total", reason="evicted") == 6
    assert kept.value("connections_ended_total", reason="refused") == 7
    assert kept.value("precision_bytes", precision="int8/int4") == 5
    assert [kept.value("score", decade=str(decade)) for decade in range(3)] == [0, 2, 1]
    # Readers within a second share what was read.
    assert len(asked) == 1
    clock.now += 2.0
    assert kept.value("variants") == 3
    assert len(asked) == 2


def test_a_span_is_a_child_of_the_callers_span(kept: RecordedTelemetry) -> None:
    with kept.telemetry.span("get", METADATA, keys=3):
        pass
    [span] = kept.spans.get_finished_spans()
    assert span.name == "get"
    assert dict(span.attributes or {}) == {"keys": 3}
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT_ID


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("user-agent", "grpc-python")],
        # The last field is the sampled flag: the caller decides.
        [("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00")],
    ],
)
def test_a_caller_without_a_trace_makes_no_span(
    kept: RecordedTelemetry, metadata: list[tuple[str, str]]
) -> None:
    with kept.telemetry.span("get", metadata):
        pass
    assert kept.spans.get_finished_spans() == ()


@pytest.mark.parametrize("nonsense", ["", "x", f"00-{'0' * 32}-{PARENT_ID}-01", "00-a-b-c-d" * 99])
def test_an_invalid_trace_context_makes_no_span(kept: RecordedTelemetry, nonsense: str) -> None:
    with kept.telemetry.span("get", [("traceparent", nonsense)]):
        pass
    assert kept.spans.get_finished_spans() == ()


def test_an_error_is_recorded_on_the_span_and_raised(kept: RecordedTelemetry) -> None:
    with pytest.raises(ValueError, match="no"), kept.telemetry.span("put", METADATA):
        raise ValueError("no")
    [span] = kept.spans.get_finished_spans()
    assert not span.status.is_ok
    assert [event.name for event in span.events] == ["exception"]


def test_the_sdk_of_opentelemetry_is_not_imported_without_an_endpoint() -> None:
    code = (
        "import sys, ragcache_cachestore.telemetry.exporter as t; "
        "t.Telemetry.start(None, 'store-0').close(); "
        "print(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


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


def test_a_silent_collector_does_not_block_close() -> None:
    telemetry = Telemetry.start(f"http://127.0.0.1:{free_port()}", "store-0")
    telemetry.hit(Tier.DISK, "socket", 1024, 0.02)
    with telemetry.span("get", METADATA):
        pass
    closing = threading.Thread(target=telemetry.close)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
