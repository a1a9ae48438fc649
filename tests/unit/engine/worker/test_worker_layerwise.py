"""The worker completes layer-wise loads in the next pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from ragcache_core.identity.variant import (
    Miss,
)
from ragcache_engine.protocol.messages import (
    LoadJob,
    StepJobs,
)
from ragcache_wire.settings import EngineSettings
from ragcache_wire.watched.members import FixedMembers
from tests.kit.worker import (
    BLOCK,
    BLOCKS,
    WorkerHarness,
    key,
    save_job,
    spans,
    wait_for_puts,
)


def layerwise_worker() -> WorkerHarness:
    """Return a worker that has measured how long writes take."""
    worker = WorkerHarness(EngineSettings(cachestore=FixedMembers(()), layerwise=True))
    wanted = spans(40)
    worker.store.fill(wanted)
    for number in range(4):
        worker.load(LoadJob(str(number), wanted, 0, 40, BLOCKS, "tenant", compute_s=60.0))
    worker.cache.slots_written.clear()
    return worker


def has_all_layers(worker: WorkerHarness) -> bool:
    return not any(bool(token.isnan().any()) for token in worker.cache.slots_written.values())


def test_deferred_layers_are_written_in_the_pass() -> None:
    worker = layerwise_worker()
    wanted = spans(10, 40)
    tensors = worker.store.fill(wanted)
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant", compute_s=60.0))
    assert (outcome.tokens, outcome.reason) == (40, "")
    assert not has_all_layers(worker)
    jobs = StepJobs(num_tokens=8)
    worker.connector.begin_step(jobs)
    for name in worker.cache.index_of:
        worker.connector.wait_for_layer(name)
    worker.connector.end_pass(jobs)
    for span in wanted:
        assert torch.equal(worker.cache.read(BLOCKS, span.start, span.end), tensors[span.variant])
    assert worker.connector.take_bad_blocks() == set()
    worker.connector.close()


def test_a_step_without_a_pass_writes_no_layers() -> None:
    worker = layerwise_worker()
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant", compute_s=60.0))
    worker.connector.begin_step(StepJobs())
    worker.connector.end_pass(StepJobs())
    assert not has_all_layers(worker)
    assert worker.connector.take_bad_blocks() == set()
    worker.connector.close()


def test_layers_of_a_finished_request_are_written_before_its_blocks_are_reused() -> None:
    worker = layerwise_worker()
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant", compute_s=60.0))
    worker.connector.begin_step(StepJobs(num_tokens=8, finished_ids=("r",)))
    assert has_all_layers(worker)
    worker.connector.close()


def test_values_before_a_missing_one_are_written_completely() -> None:
    worker = layerwise_worker()
    wanted = spans(BLOCK, 40)
    worker.store.fill(wanted)
    worker.store.values[key(1)] = Miss.EVICTED
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant", compute_s=60.0))
    assert (outcome.tokens, outcome.reason) == (BLOCK, "evicted")
    assert has_all_layers(worker)
    worker.connector.close()


def test_a_pass_without_its_layers_is_recomputed() -> None:
    worker = layerwise_worker()
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant", compute_s=60.0))
    # One save of an earlier pass, and one of the pass that lacks a layer.
    worker.cache.slots_written.update(
        {slot: torch.zeros(2, 2, 1, 4).bfloat16() for slot in range(9 * BLOCK)}
    )
    worker.connector.end_pass(StepJobs(saves=(save_job(7, 0, 10),)))
    jobs = StepJobs(num_tokens=8, saves=(save_job(8, 20, 40),))
    worker.connector.begin_step(jobs)
    worker.cache.broken = True
    for name in worker.cache.index_of:
        worker.connector.wait_for_layer(name)
    worker.cache.broken = False
    worker.connector.end_pass(jobs)
    assert worker.connector.take_bad_blocks() == set(BLOCKS[: -(-40 // BLOCK)])
    wait_for_puts(worker.store, 1)
    assert [new.key for new in worker.store.puts] == [key(7)], (
        "the pass without its layers is not saved"
    )
    worker.connector.close()


def test_a_prefix_that_cannot_be_completed_is_recomputed() -> None:
    worker = layerwise_worker()
    wanted = spans(BLOCK, 40)
    worker.store.fill(wanted)
    worker.store.values[key(1)] = Miss.EVICTED
    write = worker.cache.write

    def no_later_layer(value: torch.Tensor, slots: torch.Tensor, first_layer: int = 0) -> None:
        if first_layer:
            raise RuntimeError("device error")
        write(value, slots, first_layer)

    worker.cache.write = no_later_layer  # type: ignore[method-assign]
    outcome = worker.load(LoadJob("r", wanted, 0, 40, BLOCKS, "tenant", compute_s=60.0))
    assert (outcome.tokens, outcome.reason) == (0, "evicted")
    assert worker.connector.take_bad_blocks() == set(BLOCKS[: -(-40 // BLOCK)])
    worker.connector.close()


def test_a_pass_that_writes_layers_is_not_timed() -> None:
    worker = layerwise_worker()
    worker.load(LoadJob("r", spans(40), 0, 40, BLOCKS, "tenant", compute_s=60.0))
    for teaches in (False, True):
        jobs = StepJobs(num_tokens=100, prompt_tokens=100, work=1.0)
        worker.connector.begin_step(jobs)
        for name in worker.cache.index_of:
            worker.connector.wait_for_layer(name)
        worker.connector.end_pass(jobs)
        report = worker.connector.take_report()
        assert (report is not None and len(report.passes) == 1) is teaches
    worker.connector.close()
