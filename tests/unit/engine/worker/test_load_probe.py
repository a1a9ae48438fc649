"""The worker measures declined loads only while no request runs or waits."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from ragcache_engine.protocol.messages import LoadJob, LoadOutcome, ObserveJob, StepJobs
from ragcache_engine.worker.load_probe import LoadProbe
from ragcache_engine.worker.loader import ValueLoader
from tests.kit.clock import ManualClock
from tests.kit.wait import wait_until
from tests.kit.worker import BLOCKS, WorkerHarness, spans

SPANS = spans(*range(10, 210, 10))
IDLE = StepJobs(is_idle=True)


def probe_job(name: str = "r") -> LoadJob:
    return LoadJob(name, SPANS, 0, 200, (0,) * 7, "tenant")


def step(worker: WorkerHarness, jobs: StepJobs) -> set[str]:
    worker.connector.begin_step(jobs)
    worker.connector.start_loads(jobs)
    worker.connector.advance(jobs.finished_ids, busy=jobs.num_tokens > 0)
    return worker.connector.take_released()


def run(worker: WorkerHarness, jobs: StepJobs) -> LoadOutcome:
    """Take steps until the probe ends."""
    released = step(worker, jobs)

    def has_ended() -> bool:
        if not released:
            released.update(step(worker, IDLE))
        return bool(released)

    wait_until(has_ended, "the end of the probe")
    assert released == {"r"}
    report = worker.connector.take_report()
    assert report is not None
    assert report.outcomes == []
    (probe,) = report.probes
    assert probe.variants == tuple(span.variant for span in SPANS[:8])
    return probe.outcome


def test_a_probe_is_a_load_into_the_null_block(worker: WorkerHarness) -> None:
    worker.store.fill(SPANS)
    outcome = run(worker, StepJobs(probe=probe_job(), is_idle=True, finished_ids=("r",)))
    assert (outcome.request_id, outcome.reason) == ("r", "")
    assert outcome.seconds > 0
    assert outcome.bytes_by_tier["store"] == outcome.num_bytes
    assert {slot // 32 for slot in worker.cache.slots_written} == {0}
    assert worker.connector.take_received() == set(), "vLLM waits for no load"
    assert worker.connector.take_bad_blocks() == set()


def test_a_probe_waits_until_no_request_runs_or_waits(worker: WorkerHarness) -> None:
    worker.store.fill(SPANS)
    assert step(worker, StepJobs(probe=probe_job(), num_tokens=9)) == set()
    assert step(worker, StepJobs()) == set(), "a request waits"
    assert worker.store.requested == []
    assert run(worker, IDLE).reason == ""


def test_a_request_ends_a_probe(worker: WorkerHarness) -> None:
    worker.store.fill(SPANS)
    worker.store.get_gate.clear()
    step(worker, StepJobs(probe=probe_job(), is_idle=True))
    wait_until(lambda: worker.store.requested)
    step(worker, StepJobs(num_tokens=9))
    assert run(worker, StepJobs(num_tokens=9)).reason == "cancelled"
    worker.store.get_gate.set()


def test_a_probe_that_vllm_needs_the_blocks_of_is_dropped(worker: WorkerHarness) -> None:
    step(worker, StepJobs(probe=probe_job(), num_tokens=9))
    assert step(worker, StepJobs(num_tokens=9, release_kept_blocks=True)) == {"r"}
    step(worker, StepJobs(probe=probe_job("old"), num_tokens=9))
    assert step(worker, StepJobs(probe=probe_job("new"), num_tokens=9)) == {"old"}


class FakeLoader:
    """Records the jobs, and how they were cancelled."""

    def __init__(self) -> None:
        self.jobs: list[LoadJob] = []
        self.cancelled: list[str] = []

    def start(self, jobs: list[LoadJob]) -> None:
        self.jobs += jobs

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


@pytest.fixture
def probe(loader: FakeLoader, clock: ManualClock) -> LoadProbe:
    stand_in: ValueLoader = loader  # type: ignore[assignment]
    return LoadProbe(stand_in, clock)


def begin(probe: LoadProbe, loader: FakeLoader) -> LoadJob | None:
    count = len(loader.jobs)
    probe.offer(probe_job())
    probe.advance(idle=True, wanted=False)
    return loader.jobs[-1] if len(loader.jobs) > count else None


def end(probe: LoadProbe, job: LoadJob, seconds: float, reason: str = "") -> None:
    assert probe.finish(LoadOutcome(job.request_id, 1, 1, seconds, None, reason))
    assert probe.take_released() == {"r"}


def test_probes_take_a_sixteenth_of_the_time(
    probe: LoadProbe, loader: FakeLoader, clock: ManualClock
) -> None:
    job = begin(probe, loader)
    assert job is not None
    clock.sleep(2.0)
    end(probe, job, 2.0)
    clock.sleep(29.0)
    assert begin(probe, loader) is None
    assert probe.take_released() == {"r"}, "its blocks are not kept for it"
    clock.sleep(1.0)
    assert begin(probe, loader) is not None


def test_no_second_probe_waits_for_a_store_that_hangs(
    probe: LoadProbe, loader: FakeLoader, clock: ManualClock
) -> None:
    """Its thread reads until the deadline, and the loader has two."""
    job = begin(probe, loader)
    assert job is not None
    probe.advance(idle=False, wanted=True)
    clock.sleep(0.01)
    end(probe, job, 0.01, "cancelled")
    clock.sleep(job.deadline_s - 0.02)
    assert begin(probe, loader) is None
    clock.sleep(0.02)
    assert begin(probe, loader) is not None


def test_a_probe_that_no_idle_time_fits_becomes_smaller(
    probe: LoadProbe, loader: FakeLoader, clock: ManualClock
) -> None:
    sizes = []
    for is_cancelled in (True, True, True, True, True, False, False):
        job = begin(probe, loader)
        assert job is not None
        assert job.end == job.spans[-1].end
        sizes.append(len(job.spans))
        probe.advance(idle=False, wanted=is_cancelled)
        probe.advance(idle=False, wanted=is_cancelled)
        assert loader.cancelled == [job.request_id] * is_cancelled
        loader.cancelled.clear()
        end(probe, job, 0.01, "cancelled" if is_cancelled else "")
        clock.sleep(1000.0)
    assert sizes == [8, 4, 2, 1, 1, 1, 2]


def test_other_loads_are_no_probes(worker: WorkerHarness) -> None:
    worker.store.fill(SPANS)
    worker.store.get_gate.clear()
    step(worker, StepJobs(probe=probe_job(), is_idle=True))
    load = LoadJob("r", SPANS[:2], 0, 20, BLOCKS, "tenant")
    worker.connector.start_loads(StepJobs(loads=(load,)))
    worker.store.get_gate.set()
    outcome = worker.wait_for_outcome("r")
    assert (outcome.reason, outcome.tokens) == ("", 20)


def test_blocks_are_kept_until_their_observation_and_their_probe_have_ended(
    worker: WorkerHarness,
) -> None:
    worker.store.fill(SPANS)
    observe = ObserveJob("r", (), (), (), (), {})
    jobs = StepJobs(probe=probe_job(), observes=(observe,), is_idle=True)
    assert step(worker, jobs) == set(), "this worker cannot observe, but it probes"
    assert run(worker, IDLE).reason == ""
