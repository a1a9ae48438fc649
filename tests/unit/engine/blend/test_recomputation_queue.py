"""Approximate loads are rotated and recomputed in slices, and idle steps observe chunks."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.kit.clock import ManualClock
from tests.kit.wait import wait_until

if TYPE_CHECKING:
    import torch

    from ragcache_engine.blend.components import BlendComponents
else:
    torch = pytest.importorskip("torch")

from ragcache_core.blend.observation import ChunkObservation, observation_key
from ragcache_core.blend.token_selection import InfluencedChunk
from ragcache_core.identity.keys import ChunkKey
from ragcache_core.identity.variant import Codec, Miss, Precision, Provenance
from ragcache_engine.blend.chunk_observer import BUSY_SHARE, FIRST_REST_S, ChunkObserver
from ragcache_engine.blend.ranks import ONE_RANK, PassInterrupted, Ranks
from ragcache_engine.blend.recomputation_queue import RecomputationQueue
from ragcache_engine.protocol.messages import (
    BLEND_UNSUPPORTED,
    LoadJob,
    LoadOutcome,
    ObserveJob,
    PromptSlice,
    RecomputeJob,
    StepJobs,
    VariantSpan,
)
from ragcache_engine.vllm_interface.arrivals import ArrivalCounter
from ragcache_kv.rotation import KeyRotation, Pairing, Rope
from ragcache_kv.values.stored_value import StoredValue
from ragcache_wire.settings import EngineSettings
from ragcache_wire.watched.members import FixedMembers
from tests.kit.worker import (
    BLOCK,
    BLOCKS,
    TIMEOUT_S,
    FakePagedCache,
    WorkerHarness,
    key,
    save_job,
    spans,
    wait_for_puts,
)

ROPE = Rope(4, 4, Pairing.HALVES, (1.0, 0.01))
LENGTH = 140
SCRATCH = (8,)
COMPUTED = 9.0
"""The KV that a fake model computes."""


@dataclass
class FakeModel:
    """A recomputer that writes COMPUTED, and an observer that attends to given positions."""

    cache: FakePagedCache | None = None
    max_tokens: int = 64
    max_runs: int = 8
    passes: list[tuple[range, ...]] = field(default_factory=list)
    questions: list[tuple[range, tuple[int, ...]]] = field(default_factory=list)
    attended: tuple[int, ...] = ()
    chunk_shift: None = None
    ranks: Ranks = ONE_RANK
    shifted: list[tuple[range, ...]] = field(default_factory=list)
    error: Exception | None = None

    def recompute_slices(self, slices: Sequence[PromptSlice]) -> None:
        if self.error:
            raise self.error
        assert self.cache is not None
        runs = [(one, run) for one in slices for run in one.runs]
        assert len(runs) <= self.max_runs
        assert sum(len(run) for _, run in runs) <= self.max_tokens
        self.passes.append(tuple(run for _, run in runs))
        self.shifted += [tuple(one.shifted_runs) for one in slices]
        for one, run in runs:
            value = torch.full((2, 2, len(run), 1, 4), COMPUTED, dtype=torch.bfloat16)
            self.cache.write(value, self.cache.slots(one.blocks, run.start, run.stop))

    def question_attention(
        self, token_ids: Sequence[int], blocks: Sequence[int], question: range
    ) -> torch.Tensor:
        assert len(token_ids) == question.stop <= len(blocks) * BLOCK
        self.questions.append((question, tuple(blocks)))
        scores = torch.full((question.start,), 1e-6)
        scores[list(self.attended)] = 1.0
        return scores

    @property
    def recomputed(self) -> list[int]:
        return [position for runs in self.passes for run in runs for position in run]


@dataclass
class BlendWorkerHarness:
    """A worker with a fake model."""

    worker: WorkerHarness
    model: FakeModel
    rotation: KeyRotation

    def run(self, job: LoadJob, *, busy: bool = False) -> LoadOutcome:
        self.worker.connector.start_loads(StepJobs(loads=(job,)))
        return self.outcome_of(job, busy=busy)

    def outcome_of(self, job: LoadJob, *, busy: bool = False) -> LoadOutcome:
        return self.worker.wait_for_outcome(job.request_id, busy=busy)


def make_blend(
    settings: EngineSettings | None = None, rank: int | None = None
) -> BlendWorkerHarness:
    model = FakeModel()
    if rank is not None:
        model.ranks = Ranks(SimpleNamespace(world_size=2, rank_in_group=rank))
    rotation = KeyRotation(ROPE, "bfloat16")
    rotation.warm_up()  # not within a load's deadline

    @dataclass
    class FakeComponents:
        rotation: KeyRotation
        recomputer: FakeModel
        observer: FakeModel

    parts = cast("Any", FakeComponents(rotation, model, model))
    worker = WorkerHarness(settings, parts, rank=rank)
    model.cache = worker.cache
    return BlendWorkerHarness(worker, model, rotation)


@pytest.fixture
def blend() -> Iterator[BlendWorkerHarness]:
    made = make_blend()
    yield made
    made.worker.connector.close()


def chunk(start: int, end: int, influence: Callable[[int], float] = lambda _: 1.0) -> Any:
    return InfluencedChunk(start, [influence(p) for p in range(start, end)])


def recompute(
    *chunks: InfluencedChunk, exact_end: int = 10, budget: int = 0, **given: Any
) -> RecomputeJob:
    return RecomputeJob(
        exact_end=exact_end,
        token_ids=tuple(range(LENGTH)),
        chunks=chunks,
        missing=given.get("missing", ()),
        recompute_tokens=budget,
        scratch_blocks=given.get("scratch", SCRATCH),
    )


def job(
    wanted: Sequence[VariantSpan], recomputation: RecomputeJob, first: int = 0, end: int = 120
) -> LoadJob:
    return LoadJob("r", tuple(wanted), first, end, BLOCKS, "tenant", recomputation)


def is_computed(blend: BlendWorkerHarness, position: int) -> bool:
    value = blend.worker.cache.read(BLOCKS, position, position + 1)
    return bool((value == COMPUTED).all())


@pytest.mark.parametrize("base", [0, 3, 10, 5000])
def test_keys_are_rotated_to_their_new_position(blend: BlendWorkerHarness, base: int) -> None:
    wanted = spans(10, 50, 120)
    store = blend.worker.store
    tensors = {k: value.clone() for k, value in store.fill(wanted).items()}
    moved = replace(wanted[1], base_position=base)
    stored = store.values[moved.variant]
    assert isinstance(stored, StoredValue)
    info = replace(stored.info, base_position=base, provenance=Provenance(exact=False))
    store.values[moved.variant] = replace(stored, info=info)
    outcome = blend.run(job([wanted[0], moved, wanted[2]], recompute(exact_end=10)))
    assert (outcome.tokens, outcome.blended_tokens, outcome.reason) == (120, 110, "")
    assert store.requested_exact == [False]
    expected = blend.rotation.rotate_part(tensors[moved.variant], 10 - base)
    assert torch.equal(blend.worker.cache.read(BLOCKS, 10, 50), expected)
    assert torch.equal(blend.worker.cache.read(BLOCKS, 50, 120), tensors[wanted[2].variant])


def test_only_the_tokens_with_the_highest_need_are_recomputed(blend: BlendWorkerHarness) -> None:
    wanted = spans(10, 120)
    blend.worker.store.fill(wanted)
    blend.model.attended = (40,)
    strong = {20: 5.0, 21: 4.0, 90: 3.0}
    recomputation = recompute(chunk(10, 120, lambda p: strong.get(p, 0.001)), budget=3)
    outcome = blend.run(job(wanted, recomputation))
    assert outcome.recomputed_tokens == 3
    assert sorted(blend.model.recomputed) == sorted(set(blend.model.recomputed))
    assert {20, 21} <= set(blend.model.recomputed)
    assert [is_computed(blend, p) for p in (19, 20, 21, 60)] == [False, True, True, False]


def test_question_attention_is_measured_before_recomputation(blend: BlendWorkerHarness) -> None:
    wanted = spans(10, 120)
    blend.worker.store.fill(wanted)
    blend.model.attended = (77,)
    outcome = blend.run(job(wanted, recompute(chunk(10, 120), budget=8)))
    # In the request's blocks up to the context's end, then in scratch blocks.
    assert blend.model.questions == [(range(120, LENGTH), (*BLOCKS[:4], *SCRATCH))]
    assert 77 in blend.model.recomputed
    assert outcome.recomputed_tokens == 8


def test_missing_chunks_do_not_count_against_the_budget(blend: BlendWorkerHarness) -> None:
    wanted = spans(10, 50, 80, 120)
    blend.worker.store.fill(wanted)
    blend.worker.store.values[key(2)] = Miss.EVICTED
    blend.model.attended = (60, 90)
    chunks = [chunk(10, 50), chunk(50, 80), chunk(80, 120)]
    outcome = blend.run(job(wanted, recompute(*chunks, budget=10)))
    recomputed = blend.model.recomputed
    assert len(blend.model.questions) == 1
    assert set(range(50, 80)) < set(recomputed)
    assert len(set(recomputed)) == len(recomputed) == outcome.recomputed_tokens == 40


@pytest.mark.parametrize("scratch", [(), SCRATCH])
def test_a_question_is_cut_to_its_scratch_blocks(
    blend: BlendWorkerHarness, scratch: tuple[int, ...]
) -> None:
    wanted = spans(10, 120)
    blend.worker.store.fill(wanted)
    recomputation = replace(
        recompute(chunk(10, 120), budget=8, scratch=scratch), token_ids=tuple(range(1000))
    )
    assert blend.run(job(wanted, recomputation)).recomputed_tokens == 8
    assert [len(question) for question, _ in blend.model.questions] == [40] * len(scratch)


def test_without_a_budget_nothing_is_computed_or_measured(blend: BlendWorkerHarness) -> None:
    wanted = spans(10, 120)
    blend.worker.store.fill(wanted)
    outcome = blend.run(job(wanted, recompute(chunk(10, 120))))
    assert (blend.model.passes, blend.model.questions, outcome.recomputed_tokens) == ([], [], 0)


def test_a_missing_chunk_may_overlap_the_cached_prefix(blend: BlendWorkerHarness) -> None:
    wanted = spans(10, 60, 120)
    blend.worker.store.fill(wanted)
    blend.worker.store.values[key(1)] = Miss.EVICTED
    outcome = blend.run(job(wanted[1:], recompute(exact_end=32), first=32))
    assert (outcome.reason, outcome.tokens, outcome.recomputed_tokens) == ("", 88, 28)
    assert blend.model.recomputed == list(range(32, 60))


def test_the_cached_prefix_is_never_recomputed(blend: BlendWorkerHarness) -> None:
    wanted = spans(10, 120)
    blend.worker.store.fill(wanted)
    outcome = blend.run(job(wanted, recompute(chunk(10, 120), exact_end=32, budget=999), first=32))
    assert sorted(blend.model.recomputed) == list(range(32, 120))
    assert outcome.recomputed_tokens == 88


@pytest.mark.parametrize("miss", [Miss.EVICTED, Miss.CORRUPT])
def test_a_missing_chunk_is_recomputed_completely(blend: BlendWorkerHarness, miss: Miss) -> None:
    wanted = spans(10, 50, 80, 120)
    blend.worker.store.fill(wanted)
    blend.worker.store.values[key(2)] = miss
    outcome = blend.run(job(wanted, recompute(missing=(range(100, 104),))))
    assert (outcome.reason, outcome.tokens, outcome.recomputed_tokens) == ("", 120, 34)
    assert (outcome.blended_tokens, outcome.missing_ranges) == (110, (range(50, 80),))
    assert blend.model.recomputed == [*range(50, 80), *range(100, 104)]
    assert blend.worker.connector.take_bad_blocks() == set()


def test_missing_positions_hold_zeros_until_they_are_recomputed(blend: BlendWorkerHarness) -> None:
    wanted = spans(10, 120)
    blend.worker.store.fill(wanted)
    found: list[torch.Tensor] = []

    def read_missing(
        token_ids: Sequence[int], blocks: Sequence[int], question: range
    ) -> torch.Tensor:
        found.append(blend.worker.cache.read(BLOCKS, 60, 70))
        return torch.zeros(120)

    blend.model.question_attention = read_missing  # type: ignore[method-assign]
    blend.run(job(wanted, recompute(chunk(10, 60), budget=1, missing=(range(60, 70),))))
    assert not found[0].any()


def test_an_exact_value_that_was_re_encoded_with_a_loss_is_not_used(
    blend: BlendWorkerHarness,
) -> None:
    wanted = spans(40, 120)
    store = blend.worker.store
    store.fill(wanted)
    stored = store.values[key(0)]
    assert isinstance(stored, StoredValue)
    lossy = replace(stored.info, precision=Precision(Codec.INT8, Codec.INT8))
    store.values[key(0)] = replace(stored, info=lossy)
    outcome = blend.run(job(wanted, recompute(exact_end=40)))
    assert (outcome.missing_variant, outcome.reason) == (key(0), "other precision")


@pytest.mark.parametrize(("after", "first_bad"), [(0, 0), (1, 1)])
def test_a_failed_load_keeps_only_its_exact_blocks(
    blend: BlendWorkerHarness, after: int, first_bad: int
) -> None:
    """vLLM recomputes from the first block that is not exact, so the answer is exact."""
    wanted = spans(40, 60, 80, 120)
    blend.worker.store.fill(wanted)
    blend.worker.store.outage_after = after
    outcome = blend.run(job(wanted, recompute(exact_end=40)))
    assert outcome.reason == "store unavailable"
    assert blend.worker.connector.take_bad_blocks() == set(BLOCKS[first_bad:4])
    assert outcome.tokens == first_bad * BLOCK


@pytest.mark.parametrize("after", [2, 3])
def test_chunks_of_a_blend_after_an_outage_are_recomputed(
    blend: BlendWorkerHarness, after: int
) -> None:
    """Chunks that arrived before the outage are used."""
    wanted = spans(40, 60, 80, 120)
    blend.worker.store.fill(wanted)
    blend.worker.store.outage_after = after
    outcome = blend.run(job(wanted, recompute(exact_end=40)))
    missing = [range(span.start, span.end) for span in wanted[after:]]
    assert (outcome.reason, outcome.tokens, outcome.missing_ranges) == ("", 120, tuple(missing))
    assert outcome.missing_reasons == {"store unavailable": len(missing)}
    assert blend.model.recomputed == list(range(missing[0].start, 120))
    assert blend.worker.connector.take_bad_blocks() == set()


def test_chunks_of_a_blend_that_time_out_are_recomputed(
    blend: BlendWorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = spans(40, 60, 120)
    worker = blend.worker
    worker.store.fill(wanted)
    now_s = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now_s, time_ns=time.time_ns)
    monkeypatch.setattr("ragcache_engine.worker.loader.time", clock)
    hangs, goes_on = threading.Event(), threading.Event()
    seen = []

    class Gate:
        """The store hangs before the third value."""

        def wait(self, timeout_s: float) -> None:
            seen.append(timeout_s)
            if len(seen) == 3:
                hangs.set()
                goes_on.wait(timeout_s)

    worker.store.get_gate = cast("Any", Gate())
    wanted_job = replace(job(wanted, recompute(exact_end=40)), deadline_s=2.0)
    worker.connector.start_loads(StepJobs(loads=(wanted_job,)))
    assert hangs.wait(TIMEOUT_S)
    worker.connector.advance((), busy=False)  # writes the first two
    assert worker.connector.take_received() == set()
    now_s += 3.0
    outcome = blend.outcome_of(wanted_job)
    goes_on.set()
    assert (outcome.reason, outcome.missing_ranges) == ("", (range(60, 120),))
    assert (outcome.missing_reasons, outcome.timed_out) == ({"load timed out": 1}, True)
    assert blend.model.recomputed == list(range(60, 120))


def test_a_step_with_other_requests_recomputes_one_slice(blend: BlendWorkerHarness) -> None:
    made = make_blend(EngineSettings(cachestore=FixedMembers(()), recompute_slice_tokens=16))
    wanted = spans(10, 120)
    made.worker.store.fill(wanted)
    recomputation = recompute(chunk(10, 120), budget=110)
    assert made.run(job(wanted, recomputation), busy=True).recomputed_tokens == 110
    sizes = [sum(map(len, runs)) for runs in made.model.passes]
    assert sizes == [16] * 6 + [14]
    assert made.model.recomputed == list(range(10, 120))
    made.worker.connector.close()


def test_no_pass_shifts_what_another_one_recomputes() -> None:
    made = make_blend(EngineSettings(cachestore=FixedMembers(()), recompute_slice_tokens=16))
    wanted = spans(10, 120)
    made.worker.store.fill(wanted)
    made.run(job(wanted, recompute(chunk(10, 120), budget=40)), busy=True)
    assert made.model.recomputed == list(range(10, 50))
    assert made.model.shifted == [(range(50, 120),)] * 3
    made.worker.connector.close()


def test_a_cancelled_recomputation_stops_and_is_reported() -> None:
    made = make_blend(EngineSettings(cachestore=FixedMembers(()), recompute_slice_tokens=16))
    wanted = spans(10, 120)
    made.worker.store.fill(wanted)
    connector = made.worker.connector
    connector.start_loads(StepJobs(loads=(job(wanted, recompute(chunk(10, 120), budget=110)),)))

    def has_begun() -> bool:
        connector.advance((), busy=True)
        return bool(made.model.passes)

    wait_until(has_begun)
    done = len(made.model.passes)
    connector.advance({"r"}, busy=True)
    assert connector.take_received() == {"r"}
    connector.advance((), busy=True)
    assert len(made.model.passes) == done
    connector.close()


def test_a_recomputation_that_raises_fails_only_its_load(blend: BlendWorkerHarness) -> None:
    wanted = spans(40, 120)
    blend.worker.store.fill(wanted)
    blend.model.error = RuntimeError("device error")
    outcome = blend.run(job(wanted, recompute(chunk(40, 120), exact_end=40, budget=5)))
    assert (outcome.reason, outcome.recomputed_tokens) == ("recompute failed", 0)
    assert blend.worker.connector.take_bad_blocks() == set(BLOCKS[1:4])
    blend.model.error = None
    assert blend.run(job(wanted, recompute(chunk(40, 120), budget=5))).reason == ""


def make_queue(
    model: FakeModel, slice_tokens: int, *, joins_passes: bool = False
) -> RecomputationQueue:
    model.cache = FakePagedCache()
    blend = cast("BlendComponents", SimpleNamespace(recomputer=model, observer=model))
    return RecomputationQueue(
        cast("Any", model.cache), blend, slice_tokens, 8, joins_passes=joins_passes
    )


def written_load(name: str, number: int, budget: int) -> tuple[LoadJob, LoadOutcome]:
    """Return a load of positions 10 to 120 whose values are in blocks of its own."""
    recomputation = recompute(chunk(10, 120), budget=budget, scratch=())
    blocks = tuple(block + 100 * number for block in BLOCKS)
    loaded = replace(job(spans(10, 120), recomputation), request_id=name, blocks=blocks)
    return loaded, LoadOutcome(name, 120, 1, 0.1, None, "")


def run_until_idle(recomputations: RecomputationQueue) -> dict[str, LoadOutcome]:
    ended = {}
    for _ in range(50):
        ended.update(
            {job.request_id: outcome for job, outcome in recomputations.advance(busy=True)}
        )
    assert recomputations.idle
    return ended


def test_loads_that_arrive_together_share_passes() -> None:
    model = FakeModel()
    recomputations = make_queue(model, slice_tokens=64)
    for number, name in enumerate(("one", "two", "three")):
        recomputations.start(*written_load(name, number, budget=40))
    ended = run_until_idle(recomputations)
    assert {name: outcome.recomputed_tokens for name, outcome in ended.items()} == dict.fromkeys(
        ended, 40
    )
    assert list(ended) == ["one", "two", "three"]
    assert [sum(map(len, runs)) for runs in model.passes] == [64, 56]
    assert model.cache is not None
    for number in range(3):
        blocks = written_load("", number, 0)[0].blocks
        for position in range(10, 50):
            [slot] = model.cache.slots(blocks, position, position + 1).tolist()
            assert (model.cache.slots_written[slot] == COMPUTED).all()


def left(outcome: LoadOutcome) -> int:
    return sum(map(len, outcome.left_to_recompute))


@pytest.mark.parametrize(
    ("busy", "budget", "in_own_passes"),
    [
        (False, 30, 0),  # all fit into the pass of the rest of the prompt, 20 tokens of 64
        (False, 44, 0),
        (False, 45, 45),
        (True, 16, 0),
        (True, 40, 32),  # in slices of 16
    ],
)
def test_vllms_own_pass_recomputes_what_it_has_room_for(
    busy: bool, budget: int, in_own_passes: int
) -> None:
    model = FakeModel()
    recomputations = make_queue(model, slice_tokens=16, joins_passes=True)
    recomputations.start(*written_load("one", 0, budget=budget))
    ended: list[tuple[LoadJob, LoadOutcome]] = []
    while not ended:
        ended = recomputations.advance(busy=busy)
    [(_, outcome)] = ended
    assert recomputations.idle
    assert outcome.recomputed_tokens == budget
    assert sum(len(run) for runs in model.passes for run in runs) == in_own_passes
    assert left(outcome) == budget - in_own_passes
    recomputed = set(model.recomputed)
    assert recomputed | {p for run in outcome.left_to_recompute for p in run} == set(
        range(10, 10 + budget)
    )


def test_a_pass_has_at_most_max_runs() -> None:
    model = FakeModel(max_runs=3)
    recomputations = make_queue(model, slice_tokens=64)
    for number, name in enumerate(("one", "two")):
        loaded, outcome = written_load(name, number, budget=4)
        assert loaded.recompute is not None
        apart = recompute(chunk(10, 120, lambda p: float(p % 10 == 0)), budget=4, scratch=())
        recomputations.start(replace(loaded, recompute=apart), outcome)
    ended = run_until_idle(recomputations)
    assert {name: outcome.recomputed_tokens for name, outcome in ended.items()} == {
        "one": 4,
        "two": 4,
    }
    assert [len(runs) for runs in model.passes] == [3, 3, 2]


def test_a_load_that_fails_does_not_affect_others_in_its_pass() -> None:
    model = FakeModel()
    recomputations = make_queue(model, slice_tokens=64)
    compute = model.recompute_slices

    def but_not_two(slices: Sequence[PromptSlice]) -> None:
        if any(one.blocks[0] >= 100 for one in slices):
            raise RuntimeError("device error")
        compute(slices)

    model.recompute_slices = but_not_two  # type: ignore[method-assign]
    for number, name in enumerate(("one", "two")):
        recomputations.start(*written_load(name, number, budget=20))
    ended = run_until_idle(recomputations)
    assert (ended["one"].reason, ended["one"].recomputed_tokens) == ("", 20)
    assert (ended["two"].reason, ended["two"].recomputed_tokens) == ("recompute failed", 0)


def test_an_engine_that_cannot_blend_reports_it_and_computes() -> None:
    worker = WorkerHarness()
    wanted = spans(10, 120)
    worker.store.fill(wanted)
    outcome = worker.load(job(wanted, recompute()))
    assert (outcome.reason, outcome.tokens) == (BLEND_UNSUPPORTED, 0)
    assert worker.connector.take_bad_blocks() == set(BLOCKS[:4])
    worker.connector.start_loads(StepJobs(observes=(observe_job(),)))
    assert worker.connector.take_released() == {"ended"}
    worker.connector.close()


# Observations.


def observe_job() -> ObserveJob:
    segments = (range(5), range(5, 25), range(25, 45))
    chunks: tuple[ChunkKey, ...] = (b"", *(bytes([n]) * 16 for n in (1, 2)))
    saves = {1: save_job(1, 5, 25), 2: save_job(2, 25, 45)}
    return ObserveJob("ended", tuple(range(45)), BLOCKS, segments, chunks, saves)


@dataclass
class FakeObservation:
    mass: torch.Tensor
    influence: torch.Tensor


class FakeObserver:
    def __init__(self) -> None:
        self.calls: list[range] = []
        self.error: Exception | None = None

    def observe(
        self,
        token_ids: Sequence[int],
        blocks: object,
        chunk: range,
        segments: Sequence[range],
        must_stop: Callable[[], bool],
    ) -> FakeObservation:
        if self.error:
            raise self.error
        if must_stop():
            raise PassInterrupted
        assert len(token_ids) == chunk.stop
        self.calls.append(chunk)
        mass = torch.full((len(chunk), len(segments)), 1 / len(segments))
        return FakeObservation(mass, torch.arange(len(chunk)).float())


class TimedObserver(FakeObserver):
    """Takes time of a clock for each chunk."""

    def __init__(self, clock: ManualClock, observe_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._observe_s = observe_s

    def observe(self, *args: Any) -> FakeObservation:
        self._clock.now += self._observe_s
        return super().observe(*args)


SavedObservations = list[tuple[int, ChunkObservation]]


def make_observer(
    observer: FakeObserver,
    clock: Callable[[], float] = lambda: 0.0,
    count_arrivals: Callable[[], int] | None = None,
) -> Any:
    saved: SavedObservations = []

    def save(job: Any, observation: ChunkObservation, seconds: float) -> None:
        saved.append((job.span.start, observation))

    recomputer = SimpleNamespace(max_tokens=64, ranks=ONE_RANK)
    blend = SimpleNamespace(recomputer=recomputer, observer=observer)
    like = cast("BlendComponents", blend)
    made = ChunkObserver(like, save, 60.0, clock, count_arrivals=count_arrivals)
    return made, saved


def test_an_observation_ends_for_a_request_and_is_repeated_later() -> None:
    observer, arrivals = FakeObserver(), ArrivalCounter(mmap.mmap(-1, 8))
    chunk_observer, saved = make_observer(observer, count_arrivals=arrivals.count)
    chunk_observer.start(observe_job())
    arrivals.add()  # after the step began
    assert chunk_observer.advance(idle=True, num_arrivals=0) == set()
    assert (observer.calls, saved) == ([], [])
    assert chunk_observer.advance(idle=False, num_arrivals=1) == set()
    assert chunk_observer.advance(idle=True, num_arrivals=1) == set()
    assert chunk_observer.advance(idle=True, num_arrivals=1) == {"ended"}
    assert len(saved) == 2


def test_one_chunk_is_observed_per_idle_step() -> None:
    observer = FakeObserver()
    chunk_observer, saved = make_observer(observer)
    chunk_observer.start(observe_job())
    assert chunk_observer.advance(idle=False) == set()
    assert observer.calls == []
    assert chunk_observer.advance(idle=True) == set()
    assert observer.calls == [range(5, 25)]
    assert chunk_observer.advance(idle=True) == {"ended"}
    (_, first), (_, second) = saved
    assert first.attended == ()
    assert [(one.chunk[0], one.num_tokens) for one in second.attended] == [(1, 20)]
    assert second.attended[0].inter == pytest.approx(20 / 3)
    assert second.intra == pytest.approx(20 / 3)
    assert second.influence == tuple(float(n) for n in range(20))


def test_blocks_are_released_at_the_deadline_without_an_idle_step() -> None:
    clock = ManualClock()
    chunk_observer, _ = make_observer(TimedObserver(clock, 2.0), clock)
    chunk_observer.start(observe_job())
    clock.now = 57.0
    assert chunk_observer.advance(idle=True) == set()  # one of two is observed
    clock.now = 118.0
    assert chunk_observer.advance(idle=False) == set()
    clock.now = 119.0
    assert chunk_observer.advance(idle=False) == {"ended"}


def test_a_busy_engine_observes_chunks_in_a_small_share_of_its_time() -> None:
    clock, arrivals = ManualClock(), ArrivalCounter(mmap.mmap(-1, 8))
    observer = TimedObserver(clock, 0.5)
    chunk_observer, saved = make_observer(observer, clock, arrivals.count)
    observed_s = []
    while clock.now < 200.0:
        if not chunk_observer._tasks:
            chunk_observer.start(observe_job())
        arrivals.add()  # which would end an observation of an idle engine
        before = len(saved)
        began = clock.now
        chunk_observer.advance(idle=False)
        observed_s += [began] * (len(saved) - before)
        clock.now += 0.25
    assert observed_s[0] == FIRST_REST_S
    assert len(saved) == 8, "one in 25 seconds"
    assert 0.5 * len(saved) <= BUSY_SHARE * clock.now


def test_no_chunk_is_observed_beside_a_recomputation() -> None:
    clock = ManualClock()
    chunk_observer, saved = make_observer(FakeObserver(), clock)
    chunk_observer.start(observe_job())
    for now in (0.0, FIRST_REST_S):
        clock.now = now
        chunk_observer.advance(idle=False, beside_work=False)
    assert saved == []


def test_blocks_are_released_when_vllm_needs_them(blend: BlendWorkerHarness) -> None:
    connector = blend.worker.connector
    connector.start_loads(StepJobs(observes=(observe_job(),)))
    connector.advance((), busy=True)
    assert connector.take_released() == set()
    connector.start_loads(StepJobs(release_kept_blocks=True))
    connector.advance((), busy=True)
    assert connector.take_released() == {"ended"}


def test_blocks_are_released_when_an_observation_fails() -> None:
    observer = FakeObserver()
    observer.error = RuntimeError("device error")
    chunk_observer, saved = make_observer(observer)
    chunk_observer.start(observe_job())
    assert chunk_observer.advance(idle=True) == {"ended"}
    assert saved == []


def test_an_observation_is_saved_with_its_variant_and_deleted_with_it(
    blend: BlendWorkerHarness,
) -> None:
    chunk_observer = FakeObserver()
    blend.model.observe = chunk_observer.observe  # type: ignore[attr-defined]
    connector, store = blend.worker.connector, blend.worker.store
    connector.start_loads(StepJobs(observes=(observe_job(),)))
    released: set[str] = set()
    for _ in range(3):
        connector.advance((), busy=False)
        released |= connector.take_released()
    assert released == {"ended"}
    wait_for_puts(store, 2)
    for number, put, raw in zip((1, 2), store.puts, store.put_bytes, strict=True):
        saved = save_job(number, 0, 20)
        assert put.key == observation_key(key(number))
        assert put.origin.document == saved.origin.document
        # A delete of its chunk, or of any chunk before it, deletes the observation.
        assert put.origin.prefix_chunks == (*saved.origin.prefix_chunks, key(number).chunk)
        assert len(ChunkObservation.from_bytes(raw).influence) == 20
        assert put.shape is None
