"""Frames of the live view, and how they are drawn."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from prometheus_client import generate_latest
from rich.console import Console

from ragcache_cli.clients.gateway_client import PlatformState
from ragcache_cli.monitoring.frame import PlatformSample, make_frame
from ragcache_cli.monitoring.metric_series import MetricSeries
from ragcache_cli.monitoring.top import draw
from ragcache_wire.telemetry.catalogue import gateway, retriever
from ragcache_wire.telemetry.metric_registry import MetricRegistry

READY: dict[str, Any] = {"ready": True, "problem": None}
QUEUE = {"queue_s": 1.5, "waiting": 2, "decoding": 4, "free_tokens": 4096}
ENGINE = {**READY, "address": "10.0.0.1:8000", "model": "m", "in_flight": 3, **QUEUE}
LOST = {
    **{"ready": False, "problem": "connection refused " * 9, "address": "b:1", "model": "n"},
    "in_flight": 0,
    **dict.fromkeys(QUEUE, 0),
}
STATUS = {
    "status": "answering",
    "parts": {"retriever": READY, "engine": {**READY, "endpoints": [ENGINE, LOST]}},
}
CACHE: dict[str, Any] = {
    "variants": 1200,
    "disk_bytes": 10**9,
    "disk_capacity_bytes": 4 * 10**9,
    "memory_bytes": 10**8,
    "memory_capacity_bytes": 10**9,
    "hits": 10,
    "misses": 10,
    "misses_by_reason": {"evicted": 10},
    "evictions": {"disk": 7},
    "hit_rate": 0.5,
    "shards": [{"address": "a:1", "up": True}, {"address": "b:1", "up": False}],
    "sources": [{"state": "synchronized"}, {"state": "predicted"}, {"state": "synchronized"}],
}
REMAKE = {"documents_done": 2, "documents": 8}
COLLECTION = {"name": "docs", "documents": 8, "chunks": 80, "remake": REMAKE}
MODEL = ("chat", "ragcache", "m")


class Recorded:
    """The metrics of a gateway and a retriever."""

    def __init__(self) -> None:
        self.parts = MetricRegistry("gateway"), MetricRegistry("retriever")
        of_gateway, of_retriever = self.parts
        self.requests = of_gateway.counter(gateway.REQUESTS)
        self.first_token = of_gateway.histogram(gateway.TIME_TO_FIRST_TOKEN).labels(*MODEL)
        self.tokens = of_gateway.counter(gateway.PROMPT_TOKENS)
        self.waiting = of_gateway.gauge(gateway.PRECOMPUTE_WAITING_CHUNKS)
        self.chunks = of_retriever.counter(retriever.INGESTED_CHUNKS)

    def sample(self, at_s: float, cache: Any = CACHE) -> PlatformSample:
        pages = [generate_latest(part.collectors).decode() for part in self.parts]
        state = PlatformState(STATUS, cache, [COLLECTION])
        return PlatformSample(at_s, MetricSeries.parse(pages), state)


def drawn(frame: dict[str, Any]) -> list[str]:
    shown = io.StringIO()
    Console(file=shown, width=80).print(draw(frame, "http://127.0.0.1:8080"))
    return shown.getvalue().splitlines()


def test_a_frame_is_of_the_time_between_its_samples() -> None:
    recorded = Recorded()
    recorded.requests.labels("/v1/chat/completions", "200").inc(100)
    recorded.first_token.observe(30.0)
    before = recorded.sample(10.0)
    recorded.requests.labels("/v1/chat/completions", "200").inc(6)
    recorded.requests.labels("/v1/chat/completions", "503").inc(2)
    for _ in range(10):
        recorded.first_token.observe(0.05)
    recorded.tokens.labels("loaded").inc(400)
    recorded.tokens.labels("local").inc(40)
    recorded.chunks.inc(20)
    for model, waiting in (("m", 3), ("n", 1)):
        recorded.waiting.labels(model).set(waiting)
    frame = make_frame(before, recorded.sample(12.0, CACHE | {"hits": 13, "misses": 11}))
    assert json.loads(json.dumps(frame)) == frame
    assert (frame["requests"]["per_s"], frame["requests"]["failed_per_s"]) == (4.0, 1.0)
    assert 0.04 <= frame["ttft_s"]["p99"] <= 0.06
    assert frame["ttft_since_start_s"]["p99"] > 10
    tokens = frame["prompt_tokens_per_s"]
    assert (tokens["loaded"], tokens["cached"], tokens["computed"]) == (200.0, 20.0, 0.0)
    assert frame["cache"]["hit_rate"] == pytest.approx(0.75)
    assert frame["cache"]["sources_by_state"] == {"synchronized": 2, "predicted": 1}
    assert frame["cache"]["tiers"]["disk"]["evictions"] == 7
    assert [engine["in_flight"] for engine in frame["engines"]] == [3, 0]
    assert frame["retriever"] == READY
    ingest = frame["ingest"]
    assert ingest["precompute_waiting_chunks"] == 4, "those of all models"
    assert (ingest["chunks_per_s"], ingest["chunks"], ingest["remake_documents"]) == (10.0, 80, 8)
    lines = drawn(frame)
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    for part in ("4.0/s, 1.0/s failed", "75% now", "2 of 8 documents", "from b:1", "b:1: n,"):
        assert part in text


def test_what_is_not_reported_is_null() -> None:
    empty = MetricSeries.parse([])
    no_parts = {"retriever": {"ready": False, "problem": "it starts"}}
    engine = {"ready": False, "problem": "no engine", "endpoints": []}
    status = {"error": {"message": "the engine starts"}, "parts": {**no_parts, "engine": engine}}
    state = PlatformState(status, None, None)
    frame = make_frame(PlatformSample(0.0, empty, state), PlatformSample(2.0, empty, state))
    assert frame["status"] == {"answering": False, "problem": "the engine starts"}
    assert frame["cache"] is None
    assert set(frame["ttft_s"].values()) == {None}
    assert set(frame["prompt_tokens_per_s"].values()) == {None}
    assert frame["retriever"] == no_parts["retriever"]
    assert frame["ingest"]["chunks"] is None
    assert "no shard of the cache store answers" in "\n".join(drawn(frame))


def test_the_hit_rate_counts_from_the_start_of_a_store_that_started_again() -> None:
    recorded = Recorded()
    before = recorded.sample(0.0)
    assert make_frame(before, recorded.sample(1.0))["cache"]["hit_rate"] is None
    again = recorded.sample(1.0, CACHE | {"hits": 1, "misses": 3})
    assert make_frame(before, again)["cache"]["hit_rate"] == 0.25
