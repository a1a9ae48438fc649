"""Spans of what the connector does: every one ends, whatever became of what it is about."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from ragcache_core.cost.load_or_compute import ReuseCosts  # noqa: E402
from ragcache_core.errors import Unavailable  # noqa: E402
from ragcache_core.identity.keys import VariantKey  # noqa: E402
from ragcache_core.identity.variant import Miss, Origin  # noqa: E402
from ragcache_core.plan.prompt import plan_exact  # noqa: E402
from ragcache_core.store_api import LookupKey  # noqa: E402
from ragcache_engine.kv_cache.paged_cache import PagedCache  # noqa: E402
from ragcache_engine.protocol.messages import LoadJob, SaveJob, StepJobs  # noqa: E402
from ragcache_engine.scheduler.scheduler import ConnectorScheduler  # noqa: E402
from ragcache_engine.telemetry.request_records import RequestRecords  # noqa: E402
from ragcache_engine.worker.worker import ConnectorWorker  # noqa: E402
from ragcache_kv.store_client.sharded import ShardedLookup, ShardedStore  # noqa: E402
from ragcache_kv.values.stored_value import StoredValue  # noqa: E402
from ragcache_wire.settings import EngineSettings  # noqa: E402
from ragcache_wire.trace_context import traceparent  # noqa: E402
from ragcache_wire.watched.members import FixedMembers  # noqa: E402
from tests.unit.engine.scheduler import test_scheduler as scheduling
from tests.unit.engine.worker import test_worker as working
from tests.unit.engine.worker.test_worker import BLOCKS, TIMEOUT_S, spans  # noqa: E402
from tests.unit.wire.test_tracing import PARENT_ID, TRACE_ID, TRACED, Kept, ids  # noqa: E402

CALLER = TRACED[0][1]


class AskedStore(working.FakeStore):
    """Remembers below which span each call was made."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_below: list[str] = []

    def get(
        self, keys: Sequence[VariantKey], timeout_s: float, **options: Any
    ) -> Iterator[tuple[VariantKey, StoredValue | Miss]]:
        self.asked_below.append(traceparent())
        return super().get(keys, timeout_s, **options)

    def put(self, *given: Any, **options: Any) -> Any:
        self.asked_below.append(traceparent())
        return super().put(*given, **options)


class Worker(working.Worker):
    def __init__(self, kept: Kept) -> None:
        self.cache, self.store = working.FakeCache(), AskedStore()
        self.side = ConnectorWorker(
            EngineSettings(cachestore=FixedMembers(())),
            working.SPACE,
            cast("PagedCache", self.cache),
            cast("ShardedStore", self.store),
            None,
            kept.tracer,
        )


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.tracer.close()


@pytest.fixture
def worker(kept: Kept) -> Iterator[Worker]:
    worker = Worker(kept)
    yield worker
    worker.side.close()


def job(*ends: int, caller: str = CALLER) -> LoadJob:
    return LoadJob("r", spans(*ends), 0, ends[-1], BLOCKS, "tenant", traceparent=caller)


def until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def about(kept: Kept, name: str) -> dict[str, Any]:
    assert len(kept.exporter.get_finished_spans()) == len(kept.spans())
    found = kept.spans()[name]
    assert ids(found)[:2] == (TRACE_ID, PARENT_ID)
    return dict(found.attributes or {})


def test_a_load_says_what_came_and_the_store_is_asked_below_it(kept: Kept, worker: Worker) -> None:
    worker.store.fill(spans(10, 50))
    outcome = worker.load(job(10, 50))
    assert about(kept, "load") == {"tokens": 50, "bytes": outcome.num_bytes}
    [below] = worker.store.asked_below
    assert below == f"00-{TRACE_ID}-{ids(kept.spans()['load'])[2]}-01"


def test_a_load_that_does_not_come_says_why(kept: Kept, worker: Worker) -> None:
    worker.store.fill(spans(10))
    outcome = worker.load(job(10, 50))
    assert outcome.reason == "evicted"
    told = about(kept, "load")
    assert (told["tokens"], told["miss"]) == (10, "evicted")


def test_a_store_that_is_away_ends_the_span(kept: Kept, worker: Worker) -> None:
    worker.store.outage_after = 0
    worker.load(job(10))
    assert about(kept, "load")["miss"] == "store unavailable"


def test_a_load_that_is_late_ends_its_span_once(kept: Kept) -> None:
    worker = Worker(kept)
    worker.store.fill(spans(10))
    worker.store.gate.clear()
    worker.load(replace(job(10), deadline_s=0.05))
    worker.store.gate.set()
    assert about(kept, "load")["miss"] == "load late"
    worker.side.close()


def test_a_device_that_fails_ends_the_span(kept: Kept, worker: Worker) -> None:
    worker.store.fill(spans(10))
    worker.cache.broken = True
    worker.load(job(10))
    assert about(kept, "load")["miss"] == "write failed"


@pytest.mark.parametrize("caller", ["", "nonsense", f"00-{TRACE_ID}-{PARENT_ID}-00"])
def test_a_load_of_nobody_has_no_span(kept: Kept, worker: Worker, caller: str) -> None:
    worker.store.fill(spans(10))
    assert worker.load(job(10, caller=caller)).tokens == 10
    assert kept.spans() == {}
    assert worker.store.asked_below == [""]


def test_a_save_is_traced_with_what_became_of_it(kept: Kept, worker: Worker) -> None:
    tensors = worker.store.fill(spans(10))
    worker.load(job(10))
    [span] = spans(10)
    info = cast("StoredValue", worker.store.values[span.variant]).info
    save = SaveJob("r", span, info, Origin(domain="tenant"), {}, BLOCKS, CALLER)
    worker.side.end_pass(StepJobs(saves=(save,)))
    worker.side.begin_step(StepJobs())
    until(lambda: "save" in kept.spans())
    raw = tensors[span.variant].numel() * 2
    assert about(kept, "save") == {"tokens": 10, "bytes": raw, "outcome": "stored"}
    assert worker.store.asked_below[1].split("-")[2] == ids(kept.spans()["save"])[2]


class LookedUp(scheduling.FakeStore):
    asked_below = ""

    def lookup(self, wants: Sequence[LookupKey], *given: Any, **options: Any) -> ShardedLookup:
        self.asked_below = traceparent()
        return super().lookup(wants, *given, **options)


def scheduler(kept: Kept, store: LookedUp) -> ConnectorScheduler:
    config = EngineSettings(cachestore=FixedMembers(()), lookup_wait_s=5.0, min_load_tokens=16)
    client = cast("ShardedStore", store)
    return ConnectorScheduler(
        config, scheduling.SPACE, RequestRecords(), client, ReuseCosts(), kept.tracer
    )


def arrive(side: ConnectorScheduler, request: str, caller: str) -> int | None:
    plan = plan_exact(scheduling.PROMPT, scheduling.SPACE, "public", request).to_json()
    side.on_new_request(
        request, scheduling.PROMPT.token_ids, {"ragcache": plan}, traceparent=caller
    )
    return side.loadable_tokens(request, 0)


def test_a_lookup_is_traced_and_jobs_carry_its_caller(kept: Kept) -> None:
    store = LookedUp()
    side = scheduler(kept, store)
    assert arrive(side, "traced", CALLER) == 0
    assert about(kept, "lookup") == {"segments": 4, "held": 0, "blend": False}
    assert store.asked_below.split("-")[2] == ids(kept.spans()["lookup"])[2]
    side.on_allocated("traced", scheduling.BLOCKS, 0)
    jobs = side.step([("traced", 0, scheduling.LENGTH)], lambda _: scheduling.BLOCKS)
    assert {save.traceparent for save in jobs.saves} == {CALLER}
    assert pickle.loads(pickle.dumps(jobs)) == jobs
    side.close()


def test_a_store_that_cannot_be_asked_is_on_the_lookups_span(kept: Kept) -> None:
    store = LookedUp()
    store.outage = Unavailable("cachestore", "gone")
    side = scheduler(kept, store)
    assert arrive(side, "traced", CALLER) == 0
    assert about(kept, "lookup") == {"error.type": "Unavailable"}
    assert kept.spans()["lookup"].status.description == "Unavailable: cachestore"
    side.close()


def test_who_is_not_traced_is_looked_up_without_a_span(kept: Kept) -> None:
    store = LookedUp()
    side = scheduler(kept, store)
    assert arrive(side, "untraced", "") == 0
    assert (kept.spans(), store.asked_below) == ({}, "")
    side.close()
