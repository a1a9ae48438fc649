"""Spans of the connector. Each one ends, with every outcome."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.kit.wait import wait_until

torch = pytest.importorskip("torch")

from ragcache_core.cost.load_or_compute import ReuseCosts  # noqa: E402
from ragcache_core.errors import Unavailable  # noqa: E402
from ragcache_core.identity.keys import VariantKey  # noqa: E402
from ragcache_core.identity.variant import Miss, Origin  # noqa: E402
from ragcache_core.plan.prompt import plan_exact  # noqa: E402
from ragcache_core.store_api import LookupKey  # noqa: E402
from ragcache_engine.kv_cache.paged_cache import PagedCache  # noqa: E402
from ragcache_engine.protocol.context import EngineContext  # noqa: E402
from ragcache_engine.protocol.messages import LoadJob, SaveJob, StepJobs  # noqa: E402
from ragcache_engine.scheduler.request import NewRequest  # noqa: E402
from ragcache_engine.scheduler.scheduler import ConnectorScheduler  # noqa: E402
from ragcache_engine.telemetry.request_records import RequestRecords  # noqa: E402
from ragcache_engine.worker.worker import ConnectorWorker  # noqa: E402
from ragcache_kv.store_client.shard_router import ShardedLookup  # noqa: E402
from ragcache_kv.store_client.sharded import ShardedStore  # noqa: E402
from ragcache_kv.values.stored_value import StoredValue  # noqa: E402
from ragcache_wire.settings import EngineSettings  # noqa: E402
from ragcache_wire.tracing import traceparent  # noqa: E402
from ragcache_wire.watched.members import FixedMembers  # noqa: E402
from tests.kit import scheduler as engine_scheduler  # noqa: E402
from tests.kit.worker import (  # noqa: E402
    BLOCKS,
    SPACE,
    FakePagedCache,
    FakeStoreClient,
    WorkerHarness,
    spans,
)
from tests.unit.wire.test_tracing import PARENT_ID, TRACE_ID, TRACED, Kept, ids  # noqa: E402

CALLER = TRACED[0][1]


class TracedStore(FakeStoreClient):
    """Records the trace context of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.trace_contexts: list[str] = []

    def get(
        self, keys: Sequence[VariantKey], timeout_s: float, **options: Any
    ) -> Iterator[tuple[VariantKey, StoredValue | Miss]]:
        self.trace_contexts.append(traceparent())
        return super().get(keys, timeout_s, **options)

    def put(self, *given: Any, **options: Any) -> Any:
        self.trace_contexts.append(traceparent())
        return super().put(*given, **options)


class TracedWorker(WorkerHarness):
    store: TracedStore

    def __init__(self, kept: Kept, host_tier_bytes: int = 0) -> None:
        self.cache, self.store = FakePagedCache(), TracedStore()
        self.connector = ConnectorWorker(
            EngineContext(
                EngineSettings(cachestore=FixedMembers(()), host_tier_bytes=host_tier_bytes),
                SPACE,
                kept.tracer,
            ),
            cast("PagedCache", self.cache),
            cast("ShardedStore", self.store),
        )


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.tracer.close()


@pytest.fixture
def worker(kept: Kept) -> Iterator[TracedWorker]:
    worker = TracedWorker(kept)
    yield worker
    worker.connector.close()


def job(*ends: int, caller: str = CALLER) -> LoadJob:
    return LoadJob("r", spans(*ends), 0, ends[-1], BLOCKS, "tenant", traceparent=caller)


def attributes_of(kept: Kept, name: str) -> dict[str, Any]:
    assert len(kept.exporter.get_finished_spans()) == len(kept.spans())
    found = kept.spans()[name]
    assert ids(found)[:2] == (TRACE_ID, PARENT_ID)
    return dict(found.attributes or {})


def test_a_loads_span_has_its_outcome_and_is_the_parent_of_the_stores(
    kept: Kept, worker: TracedWorker
) -> None:
    worker.store.fill(spans(10, 50))
    outcome = worker.load(job(10, 50))
    assert attributes_of(kept, "load") == {"tokens": 50, "bytes": outcome.num_bytes}
    [context] = worker.store.trace_contexts
    assert context == f"00-{TRACE_ID}-{ids(kept.spans()['load'])[2]}-01"
    load, tier = kept.spans()["load"], kept.spans()["load tier"]
    assert ids(tier)[:2] == (TRACE_ID, ids(load)[2])
    assert dict(tier.attributes or {}) == {
        "tier": "store",
        "values": 2,
        "tokens": 50,
        "bytes": outcome.num_bytes,
    }
    assert tier.start_time == load.start_time
    assert (tier.end_time or 0) <= (load.end_time or 0)


def test_each_tier_that_a_load_has_read_has_a_span(kept: Kept) -> None:
    worker = TracedWorker(kept, host_tier_bytes=1 << 20)
    worker.store.fill(spans(10, 50))
    wait_until(lambda: worker.load(job(10)).values_by_tier == {"host": 1})
    kept.exporter.clear()
    worker.load(job(10, 50))
    found = [s for s in kept.exporter.get_finished_spans() if s.name == "load tier"]
    attributes = [dict(span.attributes or {}) for span in found]
    assert {one["tier"]: one["tokens"] for one in attributes} == {"host": 10, "store": 40}
    [load] = [s for s in kept.exporter.get_finished_spans() if s.name == "load"]
    assert {ids(span)[1] for span in found} == {ids(load)[2]}
    worker.connector.close()


def test_a_failed_loads_span_says_why(kept: Kept, worker: TracedWorker) -> None:
    worker.store.fill(spans(10))
    outcome = worker.load(job(10, 50))
    assert outcome.reason == "evicted"
    attributes = attributes_of(kept, "load")
    assert (attributes["tokens"], attributes["miss"]) == (10, "evicted")


def test_a_store_that_is_away_ends_the_span(kept: Kept, worker: TracedWorker) -> None:
    worker.store.outage_after = 0
    worker.load(job(10))
    assert attributes_of(kept, "load")["miss"] == "store unavailable"


def test_a_load_that_times_out_ends_its_span_once(kept: Kept) -> None:
    worker = TracedWorker(kept)
    worker.store.fill(spans(10))
    worker.store.get_gate.clear()
    worker.load(replace(job(10), deadline_s=0.05))
    worker.store.get_gate.set()
    assert attributes_of(kept, "load")["miss"] == "load timed out"
    worker.connector.close()


def test_a_device_error_ends_the_span(kept: Kept, worker: TracedWorker) -> None:
    worker.store.fill(spans(10))
    worker.cache.broken = True
    worker.load(job(10))
    assert attributes_of(kept, "load")["miss"] == "write failed"


@pytest.mark.parametrize("caller", ["", "nonsense", f"00-{TRACE_ID}-{PARENT_ID}-00"])
def test_a_load_without_a_trace_has_no_span(kept: Kept, worker: TracedWorker, caller: str) -> None:
    worker.store.fill(spans(10))
    assert worker.load(job(10, caller=caller)).tokens == 10
    assert kept.spans() == {}
    assert worker.store.trace_contexts == [""]


def test_a_saves_span_has_its_outcome(kept: Kept, worker: TracedWorker) -> None:
    tensors = worker.store.fill(spans(10))
    worker.load(job(10))
    [span] = spans(10)
    info = cast("StoredValue", worker.store.values[span.variant]).info
    save = SaveJob("r", span, info, Origin(domain="tenant"), {}, BLOCKS, CALLER)
    worker.connector.end_pass(StepJobs(saves=(save,)))
    worker.connector.begin_step(StepJobs())
    wait_until(lambda: "save" in kept.spans())
    raw = tensors[span.variant].numel() * 2
    assert attributes_of(kept, "save") == {"tokens": 10, "bytes": raw, "outcome": "stored"}
    assert worker.store.trace_contexts[1].split("-")[2] == ids(kept.spans()["save"])[2]


class TracedLookupStore(engine_scheduler.FakeLookupStore):
    trace_context = ""

    def lookup(self, wants: Sequence[LookupKey], *given: Any, **options: Any) -> ShardedLookup:
        self.trace_context = traceparent()
        return super().lookup(wants, *given, **options)


def make_scheduler(kept: Kept, store: TracedLookupStore) -> ConnectorScheduler:
    settings = EngineSettings(cachestore=FixedMembers(()), lookup_wait_s=5.0, min_load_tokens=16)
    client = cast("ShardedStore", store)
    engine = EngineContext(settings, engine_scheduler.SPACE, kept.tracer)
    return ConnectorScheduler(engine, RequestRecords(), client, ReuseCosts())


def arrive(scheduler: ConnectorScheduler, request: str, caller: str) -> int | None:
    plan = plan_exact(engine_scheduler.PROMPT, engine_scheduler.SPACE, "public", request).encode()
    token_ids = engine_scheduler.PROMPT.token_ids
    scheduler.on_new_request(NewRequest(request, token_ids, {"ragcache": plan}, traceparent=caller))
    return scheduler.loadable_tokens(request, 0)


def test_a_lookup_is_traced_and_jobs_carry_the_trace_context(kept: Kept) -> None:
    store = TracedLookupStore()
    scheduler = make_scheduler(kept, store)
    assert arrive(scheduler, "traced", CALLER) == 0
    assert attributes_of(kept, "lookup") == {"segments": 4, "stored": 0, "blend": False}
    assert store.trace_context.split("-")[2] == ids(kept.spans()["lookup"])[2]
    scheduler.on_allocated("traced", engine_scheduler.BLOCKS, 0)
    jobs = scheduler.step(
        [("traced", 0, engine_scheduler.LENGTH)], lambda _: engine_scheduler.BLOCKS
    )
    assert {save.traceparent for save in jobs.saves} == {CALLER}
    assert pickle.loads(pickle.dumps(jobs)) == jobs
    scheduler.close()


def test_a_failed_lookup_marks_its_span_as_an_error(kept: Kept) -> None:
    store = TracedLookupStore()
    store.outage = Unavailable("cachestore", "gone")
    scheduler = make_scheduler(kept, store)
    assert arrive(scheduler, "traced", CALLER) == 0
    assert attributes_of(kept, "lookup") == {"error.type": "Unavailable"}
    assert kept.spans()["lookup"].status.description == "Unavailable: cachestore"
    scheduler.close()


def test_a_lookup_without_a_trace_has_no_span(kept: Kept) -> None:
    store = TracedLookupStore()
    scheduler = make_scheduler(kept, store)
    assert arrive(scheduler, "untraced", "") == 0
    assert (kept.spans(), store.trace_context) == ({}, "")
    scheduler.close()
