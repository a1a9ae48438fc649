"""Loads that are not exact: turned, mended in slices, or given up without a trace; observations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from ragcache_core.blend.observation import ChunkObservation, observation_key  # noqa: E402
from ragcache_core.blend.token_ranking import InfluencedChunk  # noqa: E402
from ragcache_core.identity.keys import ChunkKey  # noqa: E402
from ragcache_core.identity.variant import Codec, Miss, Precision, Provenance  # noqa: E402
from ragcache_engine.blend.chunk_observer import ChunkObserver  # noqa: E402
from ragcache_engine.blend.prompt_slice import PromptSlice  # noqa: E402
from ragcache_engine.blend.recomputation_queue import RecomputationQueue  # noqa: E402
from ragcache_engine.protocol.messages import (  # noqa: E402
    BLEND_UNSUPPORTED,
    LoadJob,
    LoadOutcome,
    ObserveJob,
    RecomputeJob,
    StepJobs,
    VariantSpan,
)
from ragcache_kv.rotation import KeyRotation, Pairing, Rope  # noqa: E402
from ragcache_kv.values.stored_value import StoredValue  # noqa: E402
from ragcache_wire.settings import EngineSettings  # noqa: E402
from ragcache_wire.watched.members import FixedMembers  # noqa: E402
from tests.unit.engine.worker.test_worker import (  # noqa: E402
    BLOCK,
    BLOCKS,
    TIMEOUT_S,
    FakeCache,
    Worker,
    key,
    save_job,
    spans,
    until_put,
)

ROPE = Rope(4, 4, Pairing.HALVES, (1.0, 0.01))
LENGTH = 140
SCRATCH = (8,)
COMPUTED = 9.0
"""What a fake model's KV is made of."""


@dataclass
class FakeModel:
    """Recomputer and observer: writes COMPUTED, and looks at what it is told to."""

    cache: FakeCache | None = None
    max_tokens: int = 64
    max_runs: int = 8
    passes: list[tuple[range, ...]] = field(default_factory=list)
    looks: list[tuple[range, tuple[int, ...]]] = field(default_factory=list)
    looked_at: tuple[int, ...] = ()
    error: Exception | None = None

    def recompute_slices(self, parts: Sequence[PromptSlice]) -> None:
        if self.error:
            raise self.error
        assert self.cache is not None
        runs = [(part, run) for part in parts for run in part.runs]
        assert len(runs) <= self.max_runs
        assert sum(len(run) for _, run in runs) <= self.max_tokens
        self.passes.append(tuple(run for _, run in runs))
        for part, run in runs:
            value = torch.full((2, 2, len(run), 1, 4), COMPUTED, dtype=torch.bfloat16)
            self.cache.write(value, self.cache.slots(part.blocks, run.start, run.stop))

    def paid(self, blocks: Sequence[int], question: range, chunks: Sequence[range]) -> Any:
        """Attention of three layers, all of it to the chunks that are looked at."""
        layer = [float(any(p in chunk for p in self.looked_at)) for chunk in chunks]
        return SimpleNamespace(by_layer=[layer] * 3)

    def question_attention(
        self, token_ids: Sequence[int], blocks: Sequence[int], question: range, paid: Any = None
    ) -> torch.Tensor:
        assert len(token_ids) == question.stop <= len(blocks) * BLOCK
        self.looks.append((question, tuple(blocks)))
        seen = torch.full((question.start,), 1e-6)
        seen[list(self.looked_at)] = 1.0
        return seen

    @property
    def recomputed(self) -> list[int]:
        return [position for runs in self.passes for run in runs for position in run]


@dataclass
class Blending:
    """A worker with a fake model."""

    worker: Worker
    model: FakeModel
    rotation: KeyRotation

    def run(self, job: LoadJob, *, busy: bool = False) -> LoadOutcome:
        self.worker.side.start_loads(StepJobs(loads=(job,)))
        deadline = time.monotonic() + TIMEOUT_S
        while job.request_id not in self.worker.side.take_received():
            assert time.monotonic() < deadline, "the load never ended"
            time.sleep(0.001)
            self.worker.side.advance((), busy=busy)
        report = self.worker.side.take_report()
        assert report is not None
        (outcome,) = report.outcomes
        return outcome


def make(config: EngineSettings | None = None) -> Blending:
    model = FakeModel()
    rotation = KeyRotation(ROPE, "bfloat16")
    rotation.warm_up()  # not within a load's deadline

    @dataclass
    class BlendComponents:
        rotation: KeyRotation
        recomputer: FakeModel
        observer: FakeModel

    worker = Worker(config, cast("Any", BlendComponents(rotation, model, model)))
    model.cache = worker.cache
    return Blending(worker, model, rotation)


@pytest.fixture
def blending() -> Iterator[Blending]:
    made = make()
    yield made
    made.worker.side.close()


def chunk(start: int, end: int, influence: Callable[[int], float] = lambda _: 1.0) -> Any:
    return InfluencedChunk(start, [influence(p) for p in range(start, end)])


def recompute(*chunks: InfluencedChunk, exact_end: int = 10, budget: int = 0, **given: Any) -> RecomputeJob:
    return RecomputeJob(
        exact_end=exact_end,
        token_ids=tuple(range(LENGTH)),
        chunks=chunks,
        missing=given.get("holes", ()),
        recompute_tokens=budget,
        scratch_blocks=given.get("scratch", SCRATCH),
    )


def job(wanted: Sequence[VariantSpan], how: RecomputeJob, first: int = 0, end: int = 120) -> LoadJob:
    return LoadJob("r", tuple(wanted), first, end, BLOCKS, "tenant", how)


def is_computed(blending: Blending, position: int) -> bool:
    value = blending.worker.cache.read(BLOCKS, position, position + 1)
    return bool((value == COMPUTED).all())


@pytest.mark.parametrize("base", [0, 3, 10, 5000])
def test_keys_are_turned_from_where_they_were_computed_to_where_they_are_used(
    blending: Blending, base: int
) -> None:
    wanted = spans(10, 50, 120)
    store = blending.worker.store
    tensors = {k: value.clone() for k, value in store.fill(wanted).items()}
    moved = replace(wanted[1], base_position=base)
    stored = store.values[moved.variant]
    assert isinstance(stored, StoredValue)
    info = replace(stored.info, base_position=base, provenance=Provenance(exact=False))
    store.values[moved.variant] = replace(stored, info=info)
    outcome = blending.run(job([wanted[0], moved, wanted[2]], recompute(exact_end=10)))
    assert (outcome.tokens, outcome.blended_tokens, outcome.reason) == (120, 110, "")
    assert store.asked_exact == [False]
    expected = blending.rotation.rotate_part(tensors[moved.variant], 10 - base)
    assert torch.equal(blending.worker.cache.read(BLOCKS, 10, 50), expected)
    assert torch.equal(blending.worker.cache.read(BLOCKS, 50, 120), tensors[wanted[2].variant])


def test_the_tokens_in_most_need_are_computed_anew_and_no_others(blending: Blending) -> None:
    wanted = spans(10, 120)
    blending.worker.store.fill(wanted)
    blending.model.looked_at = (40,)
    strong = {20: 5.0, 21: 4.0, 90: 3.0}
    how = recompute(chunk(10, 120, lambda p: strong.get(p, 0.001)), budget=3)
    outcome = blending.run(job(wanted, how))
    assert outcome.recomputed_tokens == 3
    assert sorted(blending.model.recomputed) == sorted(set(blending.model.recomputed))
    assert {20, 21} <= set(blending.model.recomputed)
    assert [is_computed(blending, p) for p in (19, 20, 21, 60)] == [False, True, True, False]


def test_the_question_looks_before_anything_is_mended(blending: Blending) -> None:
    wanted = spans(10, 120)
    blending.worker.store.fill(wanted)
    blending.model.looked_at = (77,)
    outcome = blending.run(job(wanted, recompute(chunk(10, 120), budget=8)))
    # In the request's own blocks up to the context's end, and from there on in scratch.
    assert blending.model.looks == [(range(120, LENGTH), (*BLOCKS[:4], *SCRATCH))]
    assert 77 in blending.model.recomputed
    assert outcome.recomputed_tokens == 8


@pytest.mark.parametrize("focus", [False, True])
def test_chunks_that_the_question_does_not_look_at_may_be_let_go(focus: bool) -> None:
    made = make(EngineSettings(cachestore=FixedMembers(()), focused_chunks=focus))
    wanted = spans(10, 50, 80, 120)
    made.worker.store.fill(wanted)
    made.worker.store.values[key(3)] = Miss.EVICTED
    made.model.looked_at = (55, 60)
    how = recompute(chunk(10, 50), chunk(50, 80, lambda _: 5.0), budget=60)
    outcome = made.run(job(wanted, how))
    # What did not come is computed all the same.
    own = {*range(50, 80), *range(80, 120)}
    others = set(made.model.recomputed) - own
    assert own <= set(made.model.recomputed)
    assert len(others) == (0 if focus else 30)
    assert outcome.recomputed_tokens == 70 + len(others)
    made.worker.side.close()


def test_what_did_not_come_takes_nothing_of_the_budget(blending: Blending) -> None:
    wanted = spans(10, 50, 80, 120)
    blending.worker.store.fill(wanted)
    blending.worker.store.values[key(2)] = Miss.EVICTED
    blending.model.looked_at = (60, 90)
    chunks = [chunk(10, 50), chunk(50, 80), chunk(80, 120)]
    outcome = blending.run(job(wanted, recompute(*chunks, budget=10)))
    recomputed = blending.model.recomputed
    assert len(blending.model.looks) == 1
    assert set(range(50, 80)) < set(recomputed)
    assert len(set(recomputed)) == len(recomputed) == outcome.recomputed_tokens == 40


@pytest.mark.parametrize("scratch", [(), SCRATCH])
def test_a_question_has_no_more_room_than_there_is(
    blending: Blending, scratch: tuple[int, ...]
) -> None:
    wanted = spans(10, 120)
    blending.worker.store.fill(wanted)
    how = replace(recompute(chunk(10, 120), budget=8, scratch=scratch), token_ids=tuple(range(1000)))
    assert blending.run(job(wanted, how)).recomputed_tokens == 8
    assert [len(question) for question, _ in blending.model.looks] == [40] * len(scratch)


def test_without_a_budget_nothing_is_computed_nor_looked_at(blending: Blending) -> None:
    wanted = spans(10, 120)
    blending.worker.store.fill(wanted)
    outcome = blending.run(job(wanted, recompute(chunk(10, 120))))
    assert (blending.model.passes, blending.model.looks, outcome.recomputed_tokens) == ([], [], 0)


def test_a_chunk_part_of_which_the_engine_holds_itself_may_be_lost(blending: Blending) -> None:
    wanted = spans(10, 60, 120)
    blending.worker.store.fill(wanted)
    blending.worker.store.values[key(1)] = Miss.EVICTED
    outcome = blending.run(job(wanted[1:], recompute(exact_end=32), first=32))
    assert (outcome.reason, outcome.tokens, outcome.recomputed_tokens) == ("", 88, 28)
    assert blending.model.recomputed == list(range(32, 60))


def test_what_the_engine_holds_itself_is_never_computed_anew(blending: Blending) -> None:
    wanted = spans(10, 120)
    blending.worker.store.fill(wanted)
    outcome = blending.run(job(wanted, recompute(chunk(10, 120), exact_end=32, budget=999), first=32))
    assert sorted(blending.model.recomputed) == list(range(32, 120))
    assert outcome.recomputed_tokens == 88


@pytest.mark.parametrize("miss", [Miss.EVICTED, Miss.CORRUPT])
def test_a_chunk_that_does_not_come_is_computed_in_whole(blending: Blending, miss: Miss) -> None:
    wanted = spans(10, 50, 80, 120)
    blending.worker.store.fill(wanted)
    blending.worker.store.values[key(2)] = miss
    outcome = blending.run(job(wanted, recompute(holes=(range(100, 104),))))
    assert (outcome.reason, outcome.tokens, outcome.recomputed_tokens) == ("", 120, 34)
    assert (outcome.blended_tokens, outcome.missing_ranges) == (110, (range(50, 80),))
    assert blending.model.recomputed == [*range(50, 80), *range(100, 104)]
    assert blending.worker.side.take_bad_blocks() == set()


def test_holes_hold_zeros_until_they_are_computed(blending: Blending) -> None:
    wanted = spans(10, 120)
    blending.worker.store.fill(wanted)
    found: list[torch.Tensor] = []

    def look(*_: Any) -> torch.Tensor:
        found.append(blending.worker.cache.read(BLOCKS, 60, 70))
        return torch.zeros(120)

    blending.model.question_attention = look  # type: ignore[method-assign]
    blending.run(job(wanted, recompute(chunk(10, 60), budget=1, holes=(range(60, 70),))))
    assert not found[0].any()


def test_an_exact_value_that_is_held_with_a_loss_by_now_is_not_used(blending: Blending) -> None:
    wanted = spans(40, 120)
    store = blending.worker.store
    store.fill(wanted)
    stored = store.values[key(0)]
    assert isinstance(stored, StoredValue)
    lossy = replace(stored.info, precision=Precision(Codec.INT8, Codec.INT8))
    store.values[key(0)] = replace(stored, info=lossy)
    outcome = blending.run(job(wanted, recompute(exact_end=40)))
    assert (outcome.missing_variant, outcome.reason) == (key(0), "other precision")


@pytest.mark.parametrize(("after", "first_bad"), [(0, 0), (1, 1)])
def test_what_is_not_exact_is_given_up_with_whatever_fails(
    blending: Blending, after: int, first_bad: int
) -> None:
    """An exact answer comes of vLLM's computing from the first block on that is not."""
    wanted = spans(40, 60, 80, 120)
    blending.worker.store.fill(wanted)
    blending.worker.store.outage_after = after
    outcome = blending.run(job(wanted, recompute(exact_end=40)))
    assert outcome.reason == "store unavailable"
    assert blending.worker.side.take_bad_blocks() == set(BLOCKS[first_bad:4])
    assert outcome.tokens == first_bad * BLOCK


@pytest.mark.parametrize("after", [2, 3])
def test_what_does_not_come_any_more_of_a_blend_is_computed(blending: Blending, after: int) -> None:
    """A store that goes away takes what it has not sent, and nothing of what it has."""
    wanted = spans(40, 60, 80, 120)
    blending.worker.store.fill(wanted)
    blending.worker.store.outage_after = after
    outcome = blending.run(job(wanted, recompute(exact_end=40)))
    lost = [range(span.start, span.end) for span in wanted[after:]]
    assert (outcome.reason, outcome.tokens, outcome.missing_ranges) == ("", 120, tuple(lost))
    assert outcome.missing_reasons == {"store unavailable": len(lost)}
    assert blending.model.recomputed == list(range(lost[0].start, 120))
    assert blending.worker.side.take_bad_blocks() == set()
    assert blending.worker.side.take_counts().failures == {"store unavailable": len(lost)}


def test_what_is_late_of_a_blend_is_computed(blending: Blending) -> None:
    wanted = spans(40, 60, 120)
    worker = blending.worker
    worker.store.fill(wanted)
    opened = worker.store.gate
    seen = []

    class Gate:
        def wait(self, timeout_s: float) -> None:
            seen.append(timeout_s)
            if len(seen) == 3:
                opened.clear()
            opened.wait(timeout_s)

    worker.store.gate = cast("Any", Gate())
    outcome = blending.run(replace(job(wanted, recompute(exact_end=40)), deadline_s=0.3))
    opened.set()
    assert (outcome.reason, outcome.missing_ranges) == ("", (range(60, 120),))
    assert (outcome.missing_reasons, outcome.timed_out) == ({"load late": 1}, True)
    assert blending.model.recomputed == list(range(60, 120))


def test_beside_other_requests_a_step_computes_a_slice(blending: Blending) -> None:
    made = make(EngineSettings(cachestore=FixedMembers(()), recompute_slice_tokens=16))
    wanted = spans(10, 120)
    made.worker.store.fill(wanted)
    how = recompute(chunk(10, 120), budget=110)
    assert made.run(job(wanted, how), busy=True).recomputed_tokens == 110
    sizes = [sum(map(len, runs)) for runs in made.model.passes]
    assert sizes == [16] * 6 + [14]
    assert made.model.recomputed == list(range(10, 120))
    made.worker.side.close()


def test_what_is_computed_anew_is_in_runs_as_long_as_is_wanted() -> None:
    made = make(EngineSettings(cachestore=FixedMembers(()), repair_run_tokens=8))
    wanted = spans(10, 50, 80, 120)
    made.worker.store.fill(wanted)
    made.worker.store.values[key(2)] = Miss.EVICTED
    strong = {11: 2.0, 48: 3.0, 100: 4.0}
    chunks = [
        chunk(a, b, lambda p: strong.get(p, 0.001)) for a, b in ((10, 50), (50, 80), (80, 120))
    ]
    how = recompute(*chunks, budget=24, scratch=())
    outcome = made.run(job(wanted, how))
    # Between what is exact and what did not come, and around what needs it most.
    assert sorted(made.model.recomputed) == [*range(10, 18), *range(42, 80), *range(96, 104)]
    assert outcome.recomputed_tokens == 24 + 30
    made.worker.side.close()


def test_a_repair_nobody_wants_any_more_stops_and_is_reported() -> None:
    made = make(EngineSettings(cachestore=FixedMembers(()), recompute_slice_tokens=16))
    wanted = spans(10, 120)
    made.worker.store.fill(wanted)
    side = made.worker.side
    side.start_loads(StepJobs(loads=(job(wanted, recompute(chunk(10, 120), budget=110)),)))
    deadline = time.monotonic() + TIMEOUT_S
    while not made.model.passes:
        assert time.monotonic() < deadline
        side.advance((), busy=True)
    done = len(made.model.passes)
    side.advance({"r"}, busy=True)
    assert side.take_received() == {"r"}
    side.advance((), busy=True)
    assert len(made.model.passes) == done
    side.close()


def test_a_repair_that_raises_fails_its_load_and_no_other(blending: Blending) -> None:
    wanted = spans(40, 120)
    blending.worker.store.fill(wanted)
    blending.model.error = RuntimeError("device error")
    outcome = blending.run(job(wanted, recompute(chunk(40, 120), exact_end=40, budget=5)))
    assert (outcome.reason, outcome.recomputed_tokens) == ("recompute failed", 0)
    assert blending.worker.side.take_bad_blocks() == set(BLOCKS[1:4])
    blending.model.error = None
    assert blending.run(job(wanted, recompute(chunk(40, 120), budget=5))).reason == ""


def repairer(model: FakeModel, slice_tokens: int) -> RecomputationQueue:
    model.cache = FakeCache()
    like = cast("Any", model)
    return RecomputationQueue(cast("Any", model.cache), like, like, slice_tokens, 1, 8)


def to_mend(name: str, number: int, budget: int) -> tuple[LoadJob, LoadOutcome]:
    """A load of positions 10 to 120 that has been written, in blocks of its own."""
    how = recompute(chunk(10, 120), budget=budget, scratch=())
    blocks = tuple(block + 100 * number for block in BLOCKS)
    loaded = replace(job(spans(10, 120), how), request_id=name, blocks=blocks)
    return loaded, LoadOutcome(name, 120, 1, 0.1, None, "")


def until_mended(mending: RecomputationQueue) -> dict[str, LoadOutcome]:
    ended = {}
    for _ in range(50):
        ended.update({job.request_id: outcome for job, outcome in mending.advance(busy=True)})
    assert mending.idle
    return ended


def test_loads_that_come_together_share_passes() -> None:
    model = FakeModel()
    mending = repairer(model, slice_tokens=64)
    for number, name in enumerate(("one", "two", "three")):
        mending.start(*to_mend(name, number, budget=40))
    ended = until_mended(mending)
    assert {name: outcome.recomputed_tokens for name, outcome in ended.items()} == dict.fromkeys(ended, 40)
    assert list(ended) == ["one", "two", "three"]
    assert [sum(map(len, runs)) for runs in model.passes] == [64, 56]
    assert model.cache is not None
    for number in range(3):
        blocks = to_mend("", number, 0)[0].blocks
        for position in range(10, 50):
            [slot] = model.cache.slots(blocks, position, position + 1).tolist()
            assert (model.cache.slots_written[slot] == COMPUTED).all()


def test_a_pass_has_no_more_runs_than_it_may() -> None:
    model = FakeModel(max_runs=3)
    mending = repairer(model, slice_tokens=64)
    for number, name in enumerate(("one", "two")):
        loaded, outcome = to_mend(name, number, budget=4)
        assert loaded.recompute is not None
        apart = recompute(chunk(10, 120, lambda p: float(p % 10 == 0)), budget=4, scratch=())
        mending.start(replace(loaded, recompute=apart), outcome)
    ended = until_mended(mending)
    assert {name: outcome.recomputed_tokens for name, outcome in ended.items()} == {"one": 4, "two": 4}
    assert [len(runs) for runs in model.passes] == [3, 3, 2]


def test_one_that_cannot_be_computed_takes_no_other_of_its_pass_along() -> None:
    model = FakeModel()
    mending = repairer(model, slice_tokens=64)
    compute = model.recompute_slices

    def but_not_two(parts: Sequence[PromptSlice]) -> None:
        if any(part.blocks[0] >= 100 for part in parts):
            raise RuntimeError("device error")
        compute(parts)

    model.recompute_slices = but_not_two  # type: ignore[method-assign]
    for number, name in enumerate(("one", "two")):
        mending.start(*to_mend(name, number, budget=20))
    ended = until_mended(mending)
    assert (ended["one"].reason, ended["one"].recomputed_tokens) == ("", 20)
    assert (ended["two"].reason, ended["two"].recomputed_tokens) == ("recompute failed", 0)


def test_an_engine_that_cannot_blend_says_so_and_computes() -> None:
    worker = Worker()
    wanted = spans(10, 120)
    worker.store.fill(wanted)
    outcome = worker.load(job(wanted, recompute()))
    assert (outcome.reason, outcome.tokens) == (BLEND_UNSUPPORTED, 0)
    assert worker.side.take_bad_blocks() == set(BLOCKS[:4])
    worker.side.start_loads(StepJobs(observes=(observe_job(),)))
    assert worker.side.take_released() == {"ended"}
    worker.side.close()


# Observations.


def observe_job() -> ObserveJob:
    segments = (range(5), range(5, 25), range(25, 45))
    chunks: tuple[ChunkKey, ...] = (b"", *(bytes([n]) * 16 for n in (1, 2)))
    saves = {1: save_job(1, 5, 25), 2: save_job(2, 25, 45)}
    return ObserveJob("ended", tuple(range(45)), BLOCKS, segments, chunks, saves)


@dataclass
class Seen:
    mass: torch.Tensor
    influence: torch.Tensor


class FakeObserver:
    def __init__(self) -> None:
        self.calls: list[range] = []
        self.error: Exception | None = None

    def observe(
        self, token_ids: Sequence[int], blocks: object, chunk: range, segments: Sequence[range]
    ) -> Seen:
        if self.error:
            raise self.error
        assert len(token_ids) == chunk.stop
        self.calls.append(chunk)
        mass = torch.full((len(chunk), len(segments)), 1 / len(segments))
        return Seen(mass, torch.arange(len(chunk)).float())


Kept = list[tuple[int, ChunkObservation]]


def observing(observer: FakeObserver, clock: Callable[[], float] = lambda: 0.0) -> Any:
    kept: Kept = []

    def keep(save: Any, seen: ChunkObservation, seconds: float) -> None:
        kept.append((save.span.start, seen))

    return ChunkObserver(cast("Any", observer), 64, keep, 60.0, clock), kept


def test_chunks_are_observed_one_a_step_and_only_in_idle_ones() -> None:
    observer = FakeObserver()
    watching, kept = observing(observer)
    watching.start(observe_job())
    assert watching.advance(idle=False) == set()
    assert observer.calls == []
    assert watching.advance(idle=True) == set()
    assert observer.calls == [range(5, 25)]
    assert watching.advance(idle=True) == {"ended"}
    (_, first), (_, second) = kept
    assert first.attended == ()
    assert [(one.chunk[0], one.num_tokens) for one in second.attended] == [(1, 20)]
    assert second.attended[0].inter == pytest.approx(20 / 3)
    assert second.intra == pytest.approx(20 / 3)
    assert second.influence == tuple(float(n) for n in range(20))


def test_blocks_are_let_go_when_the_engine_is_never_idle() -> None:
    now = [0.0]
    watching, _ = observing(FakeObserver(), lambda: now[0])
    watching.start(observe_job())
    now[0] = 59.0
    assert watching.advance(idle=True) == set()  # one of two is seen
    now[0] = 118.0
    assert watching.advance(idle=False) == set()
    now[0] = 119.0
    assert watching.advance(idle=False) == {"ended"}


def test_blocks_are_let_go_when_vllm_needs_them(blending: Blending) -> None:
    side = blending.worker.side
    side.start_loads(StepJobs(observes=(observe_job(),)))
    side.advance((), busy=True)
    assert side.take_released() == set()
    side.start_loads(StepJobs(release_kept_blocks=True))
    side.advance((), busy=True)
    assert side.take_released() == {"ended"}


def test_blocks_are_let_go_when_observing_fails() -> None:
    observer = FakeObserver()
    observer.error = RuntimeError("device error")
    watching, kept = observing(observer)
    watching.start(observe_job())
    assert watching.advance(idle=True) == {"ended"}
    assert kept == []


def test_an_observation_is_stored_beside_its_variant_and_goes_with_it(blending: Blending) -> None:
    watching = FakeObserver()
    blending.model.observe = watching.observe  # type: ignore[attr-defined]
    side, store = blending.worker.side, blending.worker.store
    side.start_loads(StepJobs(observes=(observe_job(),)))
    released: set[str] = set()
    for _ in range(3):
        side.advance((), busy=False)
        released |= side.take_released()
    assert released == {"ended"}
    until_put(store, 2)
    for number, put, raw in zip((1, 2), store.puts, store.put_bytes, strict=True):
        saved = save_job(number, 0, 20)
        assert put.key == observation_key(key(number))
        assert put.origin.document == saved.origin.document
        # A delete of any chunk before it, or of its own, takes it along.
        assert put.origin.prefix_chunks == (*saved.origin.prefix_chunks, key(number).chunk)
        assert len(ChunkObservation.from_bytes(raw).influence) == 20
        assert put.shape is None
