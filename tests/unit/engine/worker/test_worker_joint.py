"""The worker reports what a joint pass did not recompute, so that vLLM recomputes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from ragcache_engine.protocol.messages import PromptSlice, StepJobs
from tests.kit.worker import BLOCK, BLOCKS, WorkerHarness, key, save_job, wait_for_puts

if TYPE_CHECKING:
    from ragcache_engine.blend.joint_pass import JointPass
    from ragcache_engine.protocol.messages import PromptSlice


class FakeJointPass:
    """Recomputes no slice of a prompt that begins with token 0."""

    def __init__(self) -> None:
        self.slices: Sequence[PromptSlice] = ()

    def prepare(self, slices: Sequence[PromptSlice]) -> None:
        self.slices = slices

    def take_failed(self) -> tuple[PromptSlice, ...]:
        return tuple(one for one in self.slices if one.token_ids[0] == 0)


def recompute(first_token: int, blocks: tuple[int, ...]) -> PromptSlice:
    tokens = (first_token,) * 131
    chunks = (range(BLOCK + 2, 70), range(70, 100))
    runs = (range(BLOCK + 8, BLOCK + 10), range(80, 90))
    return PromptSlice(tokens, blocks, runs, chunks, (range(90, 100),))


@pytest.fixture
def worker() -> WorkerHarness:
    worker = WorkerHarness(joint_pass=cast("JointPass", FakeJointPass()))
    worker.cache.slots_written.update(
        {slot: torch.zeros(2, 2, 1, 4).bfloat16() for slot in range(9 * BLOCK)}
    )
    return worker


def run(worker: WorkerHarness, jobs: StepJobs) -> set[int]:
    worker.connector.begin_step(jobs)
    worker.connector.end_pass(jobs)
    return worker.connector.take_bad_blocks()


def test_blocks_that_are_not_exact_are_recomputed(worker: WorkerHarness) -> None:
    joint = (recompute(0, BLOCKS), recompute(1, (11, 12, 13, 14, 15)))
    bad = run(worker, StepJobs(num_tokens=40, joint_recomputes=joint))
    assert bad == set(BLOCKS[1:4]), "from the first chunk to the end of the last one"
    assert run(worker, StepJobs(num_tokens=1)) == set()
    worker.connector.close()


def test_a_pass_without_its_recomputation_is_neither_saved_nor_timed(
    worker: WorkerHarness,
) -> None:
    for number, first_token in ((7, 0), (8, 1)):
        jobs = StepJobs(
            saves=(save_job(number, 20, 40),),
            joint_recomputes=(recompute(first_token, BLOCKS),),
            num_tokens=100,
            prompt_tokens=100,
        )
        run(worker, jobs)
    run(worker, StepJobs())
    wait_for_puts(worker.store, 1)
    assert [new.key for new in worker.store.puts] == [key(8)]
    report = worker.connector.take_report()
    assert report is not None
    assert len(report.passes) == 1
    worker.connector.close()
