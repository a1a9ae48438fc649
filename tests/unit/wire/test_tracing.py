"""Spans: their parents, their attributes, and that nothing is recorded without an endpoint."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from ragcache_core.errors import InvalidInput, Unavailable
from ragcache_wire.tracing import (
    MAX_CONTENT_CHARS,
    NO_SPAN,
    SpanKind,
    Tracer,
    current_metadata,
    current_span,
    metadata,
    traceparent,
    tracer,
)

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACED = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"), ("tracestate", "a=1,b=2"))
UNSAMPLED = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00"),)


@dataclass
class Kept:
    """A tracer whose spans stay in memory."""

    exports_errors: bool = False
    exports_content: bool = False
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = Tracer(
            provider,
            "test",
            exports_errors=self.exports_errors,
            exports_content=self.exports_content,
        )

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.tracer.close()


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Return the ids of the trace, of the parent span and of the span."""
    above = f"{span.parent.span_id:016x}" if span.parent else ""
    return f"{span.context.trace_id:032x}", above, f"{span.context.span_id:016x}"


def test_a_request_continues_its_callers_trace_and_passes_it_on(kept: Kept) -> None:
    with kept.tracer.start_request("GET", TRACED) as span, span.current():
        assert current_span() is span
        with kept.tracer.start_child("inner", SpanKind.CLIENT, hits=3) as inner, inner.current():
            parent, given_on = traceparent(), current_metadata()
            assert dict(inner.headers()) == dict(given_on or ())
    assert current_span() is NO_SPAN
    assert current_metadata() is None
    outer, below = kept.spans()["GET"], kept.spans()["inner"]
    assert ids(outer)[:2] == (TRACE_ID, PARENT_ID)
    assert ids(below)[:2] == (TRACE_ID, ids(outer)[2])
    assert (outer.kind, below.kind) == (SpanKind.SERVER, SpanKind.CLIENT)
    assert parent == f"00-{TRACE_ID}-{ids(below)[2]}-01"
    assert dict(given_on or ()) == {"traceparent": parent, "tracestate": "a=1,b=2"}


def test_a_request_without_a_parent_starts_a_trace_and_a_call_does_not(kept: Kept) -> None:
    with kept.tracer.start_child_of("call", ()), kept.tracer.start_child_of("other", None):
        pass
    with kept.tracer.start_child("inner"):
        pass
    with kept.tracer.start_request("GET", ()):
        pass
    assert list(kept.spans()) == ["GET"]
    assert kept.spans()["GET"].parent is None


def test_a_span_of_an_unsampled_trace_is_not_recorded(kept: Kept) -> None:
    for span in (
        kept.tracer.start_request("GET", UNSAMPLED),
        kept.tracer.start_child_of("call", UNSAMPLED),
    ):
        assert not span.is_recording
        with span, span.current(), kept.tracer.start_child("inner"):
            assert (traceparent(), dict(span.headers())) == ("", {})
    assert kept.spans() == {}


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_ratio_decides_about_traces_without_a_parent_only(ratio: float) -> None:
    # No span ends, so the port is never connected to.
    spans = tracer("http://127.0.0.1:9", "test", "one", sample_ratio=ratio)
    assert spans.start_request("GET", ()).is_recording == (ratio == 1)
    assert spans.start_request("GET", TRACED).is_recording
    assert not spans.start_request("GET", UNSAMPLED).is_recording
    spans.close()


@given(nonsense=st.text(max_size=80))
def test_an_invalid_context_is_ignored(nonsense: str) -> None:
    kept = Kept()
    with kept.tracer.start_child_of("call", [("traceparent", nonsense)]):
        pass
    with kept.tracer.start_request("GET", [("traceparent", nonsense), ("tracestate", nonsense)]):
        pass
    assert [(span.name, span.parent) for span in kept.spans().values()] == [("GET", None)]
    kept.tracer.close()


def test_a_pool_thread_has_the_span_that_it_is_given(kept: Kept) -> None:
    def ask() -> str:
        with span.current():
            return traceparent()

    span = kept.tracer.start_child_of("load", metadata(TRACED[0][1]), SpanKind.INTERNAL)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask).result()
        assert pool.submit(traceparent).result() == ""
    span.end()
    assert asked == f"00-{TRACE_ID}-{ids(kept.spans()['load'])[2]}-01"


def test_attributes_can_be_set_later_and_empty_ones_are_left_out(kept: Kept) -> None:
    with kept.tracer.start_request("GET", ()) as span:
        span.rename("GET /here")
        span.set(miss="", tokens=0)
        span.count(hits=1)
        span.count(hits=2)
        span.event("first token", chunks=3)
    span.end()
    assert len(kept.exporter.get_finished_spans()) == 1
    found = kept.spans()["GET /here"]
    assert dict(found.attributes or {}) == {"tokens": 0, "hits": 3}
    assert [(e.name, dict(e.attributes or {})) for e in found.events] == [
        ("first token", {"chunks": 3})
    ]


@pytest.mark.parametrize(
    ("error", "description"),
    [(InvalidInput("query", "is 'secret'", "x"), "InvalidInput"), (ValueError("secret"), "Value")],
)
def test_only_the_type_of_an_error_is_exported(
    kept: Kept, error: Exception, description: str
) -> None:
    with suppress(type(error)), kept.tracer.start_request("GET", ()):
        raise error
    found = kept.spans()["GET"]
    assert found.status.status_code is StatusCode.ERROR
    assert (found.status.description or "").startswith(description)
    assert "secret" not in found.to_json()


def test_a_status_names_the_service_that_is_away_and_the_first_reason_stays(kept: Kept) -> None:
    with suppress(Unavailable), kept.tracer.start_request("a", ()):
        raise Unavailable("retriever", "secret")
    with suppress(Unavailable), kept.tracer.start_request("b", ()) as span:
        span.fail("too many")
        raise Unavailable("retriever", "x")
    assert kept.spans()["a"].status.description == "Unavailable: retriever"
    assert kept.spans()["b"].status.description == "too many"


def test_the_message_of_an_error_is_exported_on_request() -> None:
    kept = Kept(exports_errors=True)
    with suppress(ValueError), kept.tracer.start_request("GET", ()):
        raise ValueError("what is wrong")
    kept.tracer.close()
    assert kept.spans()["GET"].status.description == "ValueError: what is wrong"


def test_a_cancelled_span_has_not_failed(kept: Kept) -> None:
    with suppress(GeneratorExit), kept.tracer.start_request("GET", ()):
        raise GeneratorExit
    found = kept.spans()["GET"]
    assert (found.status.status_code, dict(found.attributes or {})) == (
        StatusCode.UNSET,
        {"cancelled": True},
    )


def test_without_an_endpoint_the_tracer_records_nothing() -> None:
    nothing: Any = tracer(None, "gateway", "x")
    for span in (
        nothing.start_request("a", TRACED),
        nothing.start_child_of("a", TRACED),
        nothing.start_child("a"),
    ):
        assert span is NO_SPAN
        with span, span.current():
            span.set(a=1)
            span.count(a=1)
            span.event("a")
            span.rename("b")
            span.fail("c")
            span.end()
            assert span.headers() == {}
    nothing.close()


@pytest.mark.parametrize(
    "modules",
    [
        "ragcache_gateway.__main__",
        "ragcache_retriever.__main__",
        "ragcache_engine.scheduler.scheduler",
        "ragcache_engine.worker.worker",
        "ragcache_cachestore.__main__",
    ],
)
def test_without_an_endpoint_the_sdk_of_opentelemetry_is_not_imported(modules: str) -> None:
    code = (
        f"import sys, {modules}, ragcache_wire.tracing as t; "
        "t.tracer(None, 'a', 'b').start_request('c', [('traceparent', 'd')]).end(); "
        "print(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_span_can_be_recorded_after_it_has_ended(kept: Kept) -> None:
    with kept.tracer.start_request("GET", TRACED) as span:
        kept.tracer.record("read", span, span.started_ns, span.started_ns + 5, size=3)
        guess = kept.tracer.start_child_of("guess", span.headers().items())
        guess.end(ended_ns=guess.started_ns + 7)
    outer, read, guessed = (kept.spans()[name] for name in ("GET", "read", "guess"))
    assert ids(read)[1] == ids(guessed)[1] == ids(outer)[2]
    assert (read.start_time, read.end_time) == (outer.start_time, (outer.start_time or 0) + 5)
    assert dict(read.attributes or {}) == {"size": 3}
    assert (guessed.end_time or 0) - (guessed.start_time or 0) == 7
    kept.tracer.record("lost", NO_SPAN, 1, 2)
    assert "lost" not in kept.spans()


@pytest.mark.parametrize("exports_content", [False, True])
def test_content_is_exported_only_where_that_is_set(exports_content: bool) -> None:
    kept = Kept(exports_content=exports_content)
    with kept.tracer.start_request("GET", TRACED) as span:
        span.set_content(text="secret", long="x" * (MAX_CONTENT_CHARS + 1))
    attributes = dict(kept.spans()["GET"].attributes or {})
    if exports_content:
        assert attributes == {"text": "secret", "long": "x" * MAX_CONTENT_CHARS}
    else:
        assert attributes == {}
    kept.tracer.close()
