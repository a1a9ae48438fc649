"""The worker saves what passes compute, and reports what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from ragcache_core.identity.variant import (  # noqa: E402
    Precision,
)
from ragcache_engine.kv_cache.value_tensors import native_bytes, value_shape  # noqa: E402
from ragcache_engine.protocol.messages import (  # noqa: E402
    ComputedRange,
    LoadJob,
    SaveJob,
    StepJobs,
)
from ragcache_kv.values.layout import FORMAT, value_bytes  # noqa: E402
from ragcache_wire.settings import EngineSettings  # noqa: E402
from ragcache_wire.watched.members import FixedMembers  # noqa: E402
from tests.kit.wait import wait_until  # noqa: E402
from tests.kit.worker import (  # noqa: E402
    BLOCKS,
    SPACE,
    WorkerHarness,
    key,
    save_job,
    spans,
    wait_for_puts,
)

if TYPE_CHECKING:
    pass


def test_a_variant_in_the_queue_is_not_sent_twice(worker: WorkerHarness) -> None:
    wanted = spans(40)
    worker.store.fill(wanted)
    worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant"))
    worker.store.put_gate.clear()
    for _ in range(3):
        worker.connector.end_pass(StepJobs(saves=(save_job(5, 0, 20), save_job(6, 20, 40))))
        worker.connector.begin_step(StepJobs())
    worker.store.put_gate.set()
    wait_for_puts(worker.store, 2)
    worker.connector.close()
    assert sorted(put.key.chunk for put in worker.store.puts) == [key(5).chunk, key(6).chunk]


def test_the_first_token_does_not_wait_for_copies(worker: WorkerHarness) -> None:
    tensors = worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))
    worker.cache.broken = True  # a read after this fails
    worker.connector.end_pass(StepJobs(saves=(save_job(5, 0, 40),), num_tokens=40))
    worker.connector.advance(set(), busy=True)
    worker.cache.broken = False
    worker.connector.begin_step(StepJobs(finished_ids=("r",)))  # before vLLM reuses its blocks
    worker.cache.broken = True
    wait_for_puts(worker.store, 1)
    assert worker.store.put_bytes == [bytes(native_bytes(tensors[key(0)]))]


def test_a_slow_store_fills_a_bounded_queue() -> None:
    worker = WorkerHarness(
        EngineSettings(cachestore=FixedMembers(()), save_queue_bytes=value_bytes(SPACE, 50))
    )
    wanted = spans(40)
    worker.store.fill(wanted)
    worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant"))
    worker.store.put_gate.clear()
    jobs = tuple(save_job(10 + n, 0, 20) for n in range(5))
    worker.connector.end_pass(StepJobs(saves=jobs))
    worker.connector.begin_step(StepJobs())
    worker.store.put_gate.set()
    wait_for_puts(worker.store, 2)
    worker.connector.close()
    assert len(worker.store.puts) == 2  # 50 tokens have room for two variants of 20


@pytest.mark.parametrize("done", [("first", "second"), ("first",), ()])
def test_a_prefill_engine_saves_layers_as_they_were_when_computed(done: Sequence[str]) -> None:
    worker = WorkerHarness()
    tensors = worker.store.fill(spans(10, 40))
    worker.load(LoadJob("r", spans(10, 40), 0, 40, BLOCKS, "tenant"))
    jobs = handed_off(save_job(5, 0, 10), save_job(6, 10, 40))
    worker.connector.begin_step(jobs)
    for name in done:
        worker.connector.layer_done(name)
    # Layers that have been copied are not read again.
    for slot, token in worker.cache.slots_written.items():
        changed = token.clone()
        changed[: len(done)] = 0
        worker.cache.slots_written[slot] = changed
    worker.connector.end_pass(jobs)
    wait_for_puts(worker.store, 2)
    wanted = {key(5 + n): bytes(native_bytes(tensors[key(n)])) for n in (0, 1)}
    found = zip(worker.store.puts, worker.store.put_bytes, strict=True)
    assert {put.key: raw for put, raw in found} == wanted
    worker.connector.close()


def handed_off(*saves: SaveJob) -> StepJobs:
    """Return a step whose saves another engine waits for."""
    return StepJobs(saves=tuple(replace(one, hands_off=True) for one in saves), num_tokens=40)


def prefill_engine() -> tuple[WorkerHarness, StepJobs]:
    """Return a worker with 40 cached tokens, and a step that saves them as two variants."""
    worker = WorkerHarness()
    worker.store.fill(spans(10, 40))
    worker.load(LoadJob("r", spans(10, 40), 0, 40, BLOCKS, "tenant"))
    return worker, handed_off(save_job(5, 0, 10), save_job(6, 10, 40))


def test_layers_are_sent_before_the_next_ones_are_computed() -> None:
    worker, jobs = prefill_engine()
    worker.connector.begin_step(jobs)
    worker.connector.layer_done("first")
    wait_until(lambda: worker.store.part_counts == [1, 1])  # of both variants in parallel
    worker.connector.layer_done("second")
    wait_until(lambda: sorted(worker.store.part_counts) == [1, 1, 2, 2])
    assert not worker.store.puts  # they may be wrong until the pass has ended
    worker.connector.end_pass(jobs)
    wait_for_puts(worker.store, 2)
    worker.connector.close()


@pytest.mark.parametrize("ended", ["failed", "incomplete", "not reported"])
def test_values_of_a_pass_that_failed_are_aborted(ended: str) -> None:
    worker, jobs = prefill_engine()
    worker.connector.begin_step(jobs)
    for name in worker.cache.index_of:
        worker.connector.layer_done(name)
    wait_until(lambda: worker.store.part_counts.count(2) == 2)
    if ended == "failed":
        worker.connector.end_pass(jobs, failed=True)
    elif ended == "incomplete":  # it lacked a layer, so nothing of it is saved
        worker.connector.end_pass(StepJobs(num_tokens=40))
    else:  # vLLM's second runner does not report a pass that failed
        worker.connector.begin_step(StepJobs())
    wait_until(lambda: not worker.connector._exporter._saver._pending)
    assert not worker.store.puts
    worker.connector.begin_step(jobs)
    worker.connector.end_pass(jobs)
    wait_for_puts(worker.store, 2)
    worker.connector.close()


@pytest.mark.parametrize("hands_off", [True, False])
def test_nothing_of_a_pass_that_failed_is_saved(hands_off: bool) -> None:
    worker = WorkerHarness()
    worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))
    jobs = StepJobs(saves=(replace(save_job(5, 0, 10), hands_off=hands_off),), num_tokens=40)
    worker.connector.begin_step(jobs)
    worker.connector.end_pass(jobs, failed=True)
    worker.connector.begin_step(StepJobs())
    wait_until(lambda: not worker.connector._exporter._saver._pending)
    worker.connector.close()
    assert not worker.store.puts


def test_a_put_that_failed_during_a_pass_is_retried_after_it() -> None:
    worker, jobs = prefill_engine()
    worker.store.put_outages = 2
    worker.connector.begin_step(jobs)
    worker.connector.layer_done("first")
    wait_until(lambda: worker.store.put_outages == 0)
    worker.connector.end_pass(jobs)
    wait_for_puts(worker.store, 2)
    worker.connector.close()


def test_a_layer_without_a_checksum_aborts_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(raw: object) -> int:
        raise RuntimeError("device error")

    worker, jobs = prefill_engine()
    monkeypatch.setattr("ragcache_engine.handoff.layer_staging.checksum", broken)
    worker.connector.begin_step(jobs)
    worker.connector.layer_done("first")
    worker.connector.end_pass(jobs)
    wait_until(lambda: not worker.connector._exporter._saver._pending)
    assert not worker.store.puts
    worker.connector.close()


def test_an_engine_that_stops_during_a_pass_leaves_no_thread() -> None:
    worker, jobs = prefill_engine()
    worker.connector.begin_step(jobs)
    worker.connector.layer_done("first")
    wait_until(lambda: worker.store.part_counts == [1, 1])
    worker.connector.close()
    wait_until(lambda: not worker.connector._exporter._saver._pending)
    assert not worker.store.puts


def test_a_pass_longer_than_a_put_deadline_is_put_after_the_pass() -> None:
    worker, jobs = prefill_engine()
    worker.store.put_s = 0.01
    worker.connector.begin_step(jobs)
    worker.connector.layer_done("first")
    wait_until(lambda: worker.store.puts_timed_out == 2)
    worker.store.put_s = 0.0
    worker.connector.end_pass(jobs)
    wait_for_puts(worker.store, 2)
    worker.connector.close()


def test_recomputation_passes_are_not_saved() -> None:
    worker = WorkerHarness()
    worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))
    jobs = handed_off(save_job(5, 0, 10))
    worker.connector.begin_step(jobs)
    worker.connector.end_pass(jobs)
    worker.cache.broken = True  # a read after this fails
    worker.connector.layer_done("first")
    worker.connector.layer_done("no such layer")
    wait_for_puts(worker.store, 1)
    worker.connector.close()


def test_a_layer_that_cannot_be_staged_is_copied_after_the_pass() -> None:
    worker = WorkerHarness()
    worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))
    jobs = handed_off(save_job(5, 0, 10))
    worker.connector.begin_step(jobs)
    worker.cache.broken = True
    worker.connector.layer_done("first")
    worker.cache.broken = False
    worker.connector.end_pass(jobs)
    wait_for_puts(worker.store, 1)
    worker.connector.close()


def test_the_queue_is_bounded_for_staged_values_too() -> None:
    config = EngineSettings(cachestore=FixedMembers(()), save_queue_bytes=value_bytes(SPACE, 50))
    worker = WorkerHarness(config)
    worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))
    worker.store.put_gate.clear()
    jobs = handed_off(*(save_job(10 + n, 0, 20) for n in range(5)))
    worker.connector.begin_step(jobs)
    for name in worker.cache.index_of:
        worker.connector.layer_done(name)
    worker.connector.end_pass(jobs)
    worker.store.put_gate.set()
    wait_for_puts(worker.store, 2)
    worker.connector.close()
    assert len(worker.store.puts) == 2


def test_a_save_carries_the_origin_and_the_compute_cost() -> None:
    # The fifth and the seventh are the events after a copy.
    seconds = iter([10.0, 12.0, 20.0, 21.0, 22.0, 30.0, 31.0, 40.0])
    worker = WorkerHarness()
    worker.cache.clock = lambda: next(seconds)
    worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))
    worker.connector.begin_step(StepJobs())  # at 10
    # Two seconds for 100 tokens, 30 of them of this request, and then one second for 10.
    worker.connector.end_pass(StepJobs(computed=(ComputedRange("r", 0, 30),), num_tokens=100))
    worker.connector.begin_step(StepJobs())
    job = save_job(3, 20, 40)
    worker.connector.end_pass(
        StepJobs(saves=(job,), computed=(ComputedRange("r", 30, 40),), num_tokens=10)
    )
    worker.connector.begin_step(StepJobs())
    wait_for_puts(worker.store, 1)
    (put,) = worker.store.puts
    assert worker.store.costs_s == [pytest.approx(10 * 0.02 + 10 * 0.1)]
    assert put.origin == job.origin
    assert (put.shape, put.value_format, len(put.part_bytes)) == (value_shape(SPACE), FORMAT, 2)
    assert put.info.precision == Precision()
    assert worker.store.as_of == [job.as_of]
    worker.connector.advance({"r"}, busy=False)
    worker.connector.end_pass(StepJobs(saves=(save_job(4, 20, 40),)))  # not computed here
    worker.connector.begin_step(StepJobs())
    wait_for_puts(worker.store, 2)
    assert worker.store.costs_s[1] == 0
    worker.connector.close()


def test_a_broken_device_clock_loses_only_the_cost(worker: WorkerHarness) -> None:
    def clock() -> float:
        raise RuntimeError("device error")

    worker.store.fill(spans(40))
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant"))  # begins a pass
    worker.cache.clock = clock
    computing = (ComputedRange("r", 20, 40),)
    worker.connector.end_pass(
        StepJobs(saves=(save_job(3, 20, 40),), computed=computing, num_tokens=20)
    )
    worker.connector.begin_step(StepJobs())
    worker.connector.end_pass(
        StepJobs(saves=(save_job(4, 20, 40),), computed=computing, num_tokens=20)
    )
    worker.connector.begin_step(StepJobs())
    wait_for_puts(worker.store, 2)
    assert worker.store.costs_s == [0, 0]
