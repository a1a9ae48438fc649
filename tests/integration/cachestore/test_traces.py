"""A trace continues in the store: the spans of every transport are children of the caller's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    StatusCode,
    TraceFlags,
    use_span,
)

from ragcache_cachestore.telemetry.exporter import RecordingTelemetry
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Miss, Tier, ValueShape
from ragcache_core.store_api import Deletion, LookupKey
from ragcache_kv.store_client.async_sharded import AsyncStoreClient
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.transport.shared_memory_transport import KEYS_PER_CALL
from ragcache_wire.telemetry.metric_registry import MetricRegistry
from ragcache_wire.tracing import Tracer
from ragcache_wire.watched.members import FixedMembers
from tests.kit.store import (
    TIMEOUT_S,
    ServedStore,
    key,
    put_value,
    serving,
    value,
    variant,
    whole,
)

NUM_BYTES = 100_000
TRANSPORTS = ("shared", "socket", "grpc")


class TracedStore:
    """A traced store. ``spans`` returns the spans that have ended."""

    def __init__(self, folder: Path, transports: Sequence[str]) -> None:
        self.exporter = InMemorySpanExporter()
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        tracer = Tracer(tracers, "test", exports_errors=True)
        self._telemetry = RecordingTelemetry(MetricRegistry("cachestore"), tracer)
        self._serving = serving(folder, transports=transports, telemetry=self._telemetry)
        self.served: ServedStore

    def __enter__(self) -> TracedStore:
        self.served = self._serving.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._serving.__exit__(*error)
        self._telemetry.close()

    @property
    def client(self) -> StoreClient:
        return self.served.client

    def spans(self, count: int) -> list[ReadableSpan]:
        """Wait for so many spans, and return them in the order of their start.

        A call over a transport ends in the store shortly after its caller goes on.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while len(found := self.exporter.get_finished_spans()) < count:
            assert time.monotonic() < deadline, [span.name for span in found]
            time.sleep(0.005)
        assert len(found) == count
        self.exporter.clear()
        return sorted(found, key=lambda span: span.start_time or 0)

    def span(self) -> ReadableSpan:
        """Return the only span."""
        [span] = self.spans(1)
        return span


@pytest.fixture(params=TRANSPORTS)
def traced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TracedStore]:
    transports = [] if request.param == "grpc" else [request.param]
    with TracedStore(tmp_path, transports) as traced:
        traced.client.connect(TIMEOUT_S)
        assert traced.client.transport == request.param
        yield traced


def caller(span_id: int = 1, *, sampled: bool = True) -> AbstractContextManager[Span]:
    """Make a block part of a trace."""
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return use_span(NonRecordingSpan(SpanContext(7, span_id, is_remote=False, trace_flags=flags)))


def assert_below(span: ReadableSpan, span_id: int) -> None:
    assert span.context is not None
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (7, span_id)


def about(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_get_is_traced_with_its_hits_and_misses(traced: TracedStore) -> None:
    transport = traced.client.transport
    for number in (1, 2):
        put_value(traced.client, key(number), value(NUM_BYTES))
    traced.client.delete(Deletion(id=b"d" * 16, variants=(key(2),)))
    assert not traced.exporter.get_finished_spans()
    with caller(5):
        found = [one for _, one in traced.client.get([key(1), key(2), key(3)], TIMEOUT_S)]
    assert [one for one in found if isinstance(one, Miss)] == [Miss.DELETED, Miss.NEVER_STORED]
    span = traced.span()
    assert_below(span, 5)
    assert span.name == "Get"
    assert about(span) == {
        "transport": transport,
        "keys": 3,
        "bytes": NUM_BYTES,
        "hits.memory": 1,
        "misses.deleted": 1,
        "misses.never_stored": 1,
    }
    assert span.status.status_code is StatusCode.UNSET


def test_a_put_is_traced_with_its_outcome(traced: TracedStore) -> None:
    transport, raw = traced.client.transport, value(NUM_BYTES)
    new = variant(key(1), raw)
    with caller(6):
        for _ in range(2):
            traced.client.put(new, whole(new, raw), TIMEOUT_S)
    spans = traced.spans(2)
    for span, outcome in zip(spans, ("stored", "already_stored"), strict=True):
        assert_below(span, 6)
        assert span.name == "Put"
        assert about(span) == {
            "transport": transport,
            "bytes": NUM_BYTES,
            "ack": "accepted",
            "outcome": outcome,
        }


def test_a_refused_put_records_its_error(traced: TracedStore) -> None:
    raw = value(NUM_BYTES)
    wrong = variant(key(1), raw, shape=ValueShape(1, 1, 4, "bfloat16"))
    with caller(), pytest.raises(InvalidInput, match="part_bytes"):
        traced.client.put(wrong, whole(wrong, raw), TIMEOUT_S)
    span = traced.span()
    assert span.status.status_code is StatusCode.ERROR
    assert "part_bytes[0]" in (span.status.description or "")
    assert [event.name for event in span.events] == ["exception"]
    assert "outcome" not in about(span)


def test_control_calls_are_traced(traced: TracedStore) -> None:
    put_value(traced.client, key(1), value(NUM_BYTES))
    client = traced.client
    with caller(9):
        client.lookup([LookupKey(key(1).chunk)])
        client.prefetch([key(1)])
        client.delete(Deletion(id=b"d" * 16, variants=(key(1),)))
        client.stats()
    spans = traced.spans(3)
    assert [span.name for span in spans] == ["Lookup", "Prefetch", "Delete"]
    for span in spans:
        assert_below(span, 9)


def test_a_caller_without_a_trace_makes_no_span(traced: TracedStore) -> None:
    raw = value(NUM_BYTES)
    put_value(traced.client, key(1), raw)
    with caller(sampled=False):
        put_value(traced.client, key(2), raw)
        found = [one for _, one in traced.client.get([key(2), key(1)], TIMEOUT_S)]
    assert not any(isinstance(one, Miss) for one in found)
    # Spans end in order on a connection, so an earlier one would be there by now.
    with caller(3):
        list(traced.client.get([key(4)], TIMEOUT_S))
    assert_below(traced.span(), 3)


def test_a_cached_read_makes_no_span(tmp_path: Path) -> None:
    with TracedStore(tmp_path, ["shared"]) as traced:
        put_value(traced.client, key(1), value(NUM_BYTES))
        with caller():
            for _ in range(3):
                [(_, found)] = traced.client.get([key(1)], TIMEOUT_S)
                assert not isinstance(found, Miss)
        assert about(traced.span())["hits.memory"] == 1


def test_a_get_from_disk_is_traced_as_disk_hit(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        put_value(served.client, key(1), value(NUM_BYTES))
    for transport in TRANSPORTS:
        with TracedStore(tmp_path, [] if transport == "grpc" else [transport]) as traced:
            with caller():
                [(_, found)] = traced.client.get([key(1)], TIMEOUT_S)
            assert not isinstance(found, Miss)
            assert found.tier is Tier.DISK
            assert about(traced.span()).items() >= {("transport", transport), ("hits.disk", 1)}


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_later_calls_of_one_get_belong_to_its_caller(tmp_path: Path, transport: str) -> None:
    with TracedStore(tmp_path, [transport]) as traced:
        keys = [key(number) for number in range(KEYS_PER_CALL + 1)]
        with caller(8):
            values = traced.client.get(keys, TIMEOUT_S)
        with caller(9):
            assert len(list(values)) == len(keys)
        for span in traced.spans(2):
            assert_below(span, 8)


def test_a_client_that_stops_reading_is_not_an_error(tmp_path: Path) -> None:
    with TracedStore(tmp_path, []) as traced:
        raw = value(8 << 20)
        put_value(traced.client, key(1), raw)
        with caller():
            call = traced.client.get([key(1)] * 16, TIMEOUT_S)
            next(call)
            del call
        span = traced.span()
        assert span.status.status_code is StatusCode.UNSET
        assert about(span)["cancelled"] is True
        assert about(span)["hits.memory"] < 16


async def test_async_callers_are_traced(traced: TracedStore) -> None:
    client = AsyncStoreClient(traced.served.address)
    with caller(4):
        await client.lookup([LookupKey(key(1).chunk)])
        await client.delete(Deletion(id=b"d" * 16, variants=(key(1),)))
    await client.close()
    spans = await asyncio.to_thread(traced.spans, 2)
    assert [span.name for span in spans] == ["Lookup", "Delete"]
    for span in spans:
        assert_below(span, 4)


def test_parallel_calls_to_shards_are_all_traced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        TracedStore(tmp_path / "a", ["shared"]) as one,
        TracedStore(tmp_path / "b", ["socket"]) as other,
    ):
        shards = ShardedStore(FixedMembers((one.served.address, other.served.address)))
        keys = [VariantKey(value(16, number), bytes(16)) for number in range(64)]
        with caller(2):
            shards.lookup([LookupKey(one.chunk) for one in keys])
            assert len(list(shards.get(keys, TIMEOUT_S))) == len(keys)
        shards.close()
        for traced in (one, other):
            spans = traced.spans(2)
            assert [span.name for span in spans] == ["Lookup", "Get"]
            for span in spans:
                assert_below(span, 2)


def test_threads_have_separate_traces(traced: TracedStore) -> None:
    def read(span_id: int) -> None:
        with caller(span_id):
            list(traced.client.get([key(span_id)] * span_id, TIMEOUT_S))

    threads = [threading.Thread(target=read, args=[number]) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = traced.spans(5)
    assert sorted(about(span)["keys"] for span in spans) == [1, 2, 3, 4, 5]
    for span in spans:
        assert_below(span, about(span)["keys"])


def _run_in_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_client_does_not_import_the_sdk() -> None:
    code = (
        "import sys, ragcache_kv.store_client.sharded, ragcache_wire.tracing as t; "
        "print(repr(t.traceparent()), any(n.startswith('opentelemetry.sdk') for n in sys.modules))"
    )
    assert _run_in_new_process(code) == "'' False"
