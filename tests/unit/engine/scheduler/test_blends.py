"""What the scheduler side decides for prompts that are put together from other prompts' chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from ragcache_core.blend.observation import ChunkObservation, observation_key
from ragcache_core.blend.prefix_chunks import AttendedChunk
from ragcache_core.cost.load_or_compute import TIMED_OUT_LOADS, ReuseCosts, ReuseOption
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey, chunk_key
from ragcache_core.identity.variant import Miss, Tier, ValuePart
from ragcache_core.plan.prompt import Prompt, assemble, plan_blend
from ragcache_core.plan.reuse_plan import Action
from ragcache_core.store_api import ChunkVariants, LookupKey, StoredVariant
from ragcache_engine.protocol.messages import BLEND_UNSUPPORTED, LoadJob, LoadOutcome, SaveJob
from ragcache_engine.scheduler.scheduler import ConnectorScheduler
from ragcache_engine.telemetry.request_records import RequestRecords
from ragcache_kv.store_client.sharded import ShardedLookup, ShardedStore
from ragcache_kv.values.layout import value_bytes
from ragcache_kv.values.stored_value import StoredValue
from ragcache_wire.settings import EngineSettings
from ragcache_wire.watched.members import FixedMembers
from tests.unit.engine.scheduler.test_scheduler import AS_OF, PROFILE, SPACE

HEAD, TAIL = range(20), range(9)
A, B, C, D = range(100, 140), range(200, 250), range(300, 330), range(400, 460)
BLOCK = 16
BLOCKS = tuple(range(10, 40))


class FakeStore:
    """Answers lookups of variants and of chunks, and has observations of some."""

    def __init__(self) -> None:
        self.stored: dict[VariantKey, StoredVariant] = {}
        self.seen: dict[VariantKey, bytes] = {}
        self.get_outage: Exception | None = None

    def lookup(
        self,
        wants: Sequence[LookupKey],
        timeout_s: float = 1.0,
        *,
        exact: bool = False,
        domain: str,
    ) -> ShardedLookup:
        assert domain
        return ShardedLookup(tuple(self._answer(want, exact) for want in wants), AS_OF)

    def _answer(self, want: LookupKey, exact: bool) -> ChunkVariants:
        found = [
            held
            for key, held in self.stored.items()
            if key.chunk == want.chunk and want.prefix in (None, key.prefix)
            if held.info.serves_exact or not exact
        ]
        return ChunkVariants(tuple(found)) if found else ChunkVariants(miss=Miss.NEVER_STORED)

    def get(
        self, keys: Sequence[VariantKey], timeout_s: float, *, domain: str
    ) -> Iterator[tuple[VariantKey, StoredValue | Miss]]:
        for key in keys:
            if self.get_outage:
                raise self.get_outage
            raw = self.seen.get(key)
            if raw is None:
                yield key, Miss.NEVER_STORED
                continue
            info = next(iter(self.stored.values())).info
            part = ValuePart(len(raw), 0)
            yield key, StoredValue(info, (part,), None, 0, memoryview(raw), Tier.MEMORY)

    def connect(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id


class Pool:
    """vLLM's blocks."""

    num_gpu_blocks = 400

    def __init__(self) -> None:
        self.free = [Block(n) for n in range(1000, 1100)]

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        self.free += ordered_blocks


class Engine:
    """Plays vLLM's part."""

    def __init__(self, **settings: Any) -> None:
        self.store, self.pool, self.book = FakeStore(), Pool(), RequestRecords()
        config = EngineSettings(
            cachestore=FixedMembers(()), lookup_wait_s=5.0, min_load_tokens=32, **settings
        )
        self.costs = ReuseCosts()
        store = cast("ShardedStore", self.store)
        self.side = ConnectorScheduler(config, SPACE, self.book, store, self.costs)
        self.side.bind(self.pool, BLOCK)

    def arrive(self, name: str, prompt: Prompt, budget: float = 0.2, **given: Any) -> None:
        """given: to the plan."""
        plan = replace(plan_blend(prompt, SPACE, "public", name, budget), **given)
        self.side.on_new_request(name, prompt.token_ids, {"ragcache": plan.to_json()})

    def load(self, name: str, local: int = 0) -> LoadJob:
        """Have what is wanted allocated."""
        tokens = self.side.loadable_tokens(name, local)
        assert tokens
        self.side.on_allocated(name, BLOCKS, tokens)
        (job,) = self.side.step([], lambda _: BLOCKS).loads
        return job

    def compute(self, name: str, prompt: Prompt, computed: int = 0) -> list[SaveJob]:
        """Prefill the rest; what is saved is stored."""
        self.side.on_allocated(name, BLOCKS, 0)
        left = len(prompt.token_ids) - computed
        saves = list(self.side.step([(name, computed, left)], lambda _: BLOCKS).saves)
        for job in saves:
            key = job.span.variant
            self.store.stored[key] = StoredVariant(key, job.info, Tier.MEMORY)
        return saves

    def first_visit(self, name: str, prompt: Prompt, **given: Any) -> list[SaveJob]:
        self.arrive(name, prompt, **given)
        assert self.side.loadable_tokens(name, 0) == 0
        return self.compute(name, prompt)

    def finish(self, name: str) -> bool:
        return self.side.on_finished(name, BLOCKS)


def prompt_of(*chunks: range) -> Prompt:
    return assemble(HEAD, chunks, TAIL)


FIRST = prompt_of(A, B, C)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def warm(engine: Engine) -> Engine:
    engine.first_visit("first", FIRST)
    engine.finish("first")
    engine.side.step([], lambda _: BLOCKS)
    engine.side.on_released(["first"])
    return engine


def succeed(engine: Engine, job: LoadJob, **given: Any) -> None:
    tokens = job.end - job.first
    engine.side.on_outcomes([LoadOutcome(job.request_id, tokens, 99, 0.1, None, "", **given)])


def test_the_first_visitor_computes_and_what_it_computes_is_exact(engine: Engine) -> None:
    saves = engine.first_visit("first", FIRST)
    assert [job.info.provenance.exact for job in saves] == [True] * 4
    assert engine.side.approximate_from("first") is None


def test_the_same_prompt_is_loaded_exactly(warm: Engine) -> None:
    warm.arrive("again", FIRST)
    job = warm.load("again")
    assert (job.end, job.recompute) == (FIRST.chunk_ends[-1], None)
    assert warm.side.approximate_from("again") is None


def test_chunks_come_from_wherever_they_were_computed(warm: Engine) -> None:
    prompt = prompt_of(C, A, B)
    warm.arrive("other", prompt)
    assert warm.side.loadable_tokens("other", 0) == prompt.chunk_ends[-1]
    assert warm.side.approximate_from("other") == len(HEAD)
    job = warm.load("other")
    assert [(s.start, s.end, s.base_position) for s in job.spans] == [
        (0, 20, 0),
        (20, 50, 110),
        (50, 90, 20),
        (90, 140, 60),
    ]
    assert job.recompute is not None
    assert (job.recompute.exact_end, job.recompute.missing, job.recompute.recompute_tokens) == (
        20,
        (),
        24,
    )
    assert [(c.start, len(c.influence)) for c in job.recompute.chunks] == [
        (20, 30),
        (50, 40),
        (90, 50),
    ]
    assert job.recompute.token_ids == prompt.token_ids


def test_a_head_and_a_first_chunk_in_their_place_stay_exact(warm: Engine) -> None:
    warm.arrive("other", prompt_of(A, C))
    job = warm.load("other")
    assert job.recompute is not None
    assert job.recompute.exact_end == 60
    assert [chunk.start for chunk in job.recompute.chunks] == [60]


def test_where_little_is_held_all_is_computed_and_exact(warm: Engine) -> None:
    prompt = prompt_of(D, range(500, 600), C)
    saves = warm.first_visit("other", prompt)
    assert [(save.span.start, save.info.provenance.exact) for save in saves] == [
        (20, True),
        (80, True),
        (180, True),
    ]


def test_what_nothing_is_held_of_is_a_hole_between_and_computed_behind(warm: Engine) -> None:
    warm.arrive("other", prompt_of(B, D, A, range(500, 540)))
    job = warm.load("other")
    assert job.recompute is not None
    assert job.recompute.missing == (range(70, 130),)
    assert job.end == 170
    assert [span.start for span in job.spans] == [0, 20, 130]


def test_of_what_was_computed_behind_a_blend_only_unknown_chunks_are_saved_and_tainted(
    warm: Engine,
) -> None:
    last = range(500, 540)
    prompt = prompt_of(B, D, A, last)
    warm.arrive("other", prompt)
    job = warm.load("other")
    succeed(warm, job, blended_tokens=90, recomputed_tokens=80, recompute_s=0.5)
    saves = warm.compute("other", prompt, job.end)
    assert [(s.span.start, s.info.provenance.exact) for s in saves] == [(70, False), (170, False)]
    assert not warm.finish("other")  # nor is it observed
    record = warm.book.get("other")
    assert record is not None
    assert (record.blended_tokens, record.recomputed_tokens, record.recompute_s) == (90, 80, 0.5)
    assert record.miss == ""
    # What is tainted serves blends and never stands for a computation.
    warm.arrive("next", prompt_of(B, D))
    again = warm.load("next")
    assert again.recompute is not None
    assert len(again.spans) == 3


def test_the_record_names_holes_and_what_did_not_come(warm: Engine) -> None:
    prompt = prompt_of(B, D, A, C, range(500, 540))
    warm.arrive("other", prompt)
    job = warm.load("other")
    assert job.recompute is not None
    assert job.recompute.missing == (range(70, 130),)
    succeed(warm, job, missing_ranges=(range(130, 170),))
    warm.compute("other", prompt, job.end)
    warm.finish("other")
    record = warm.book.get("other")
    assert record is not None
    assert record.missing_chunks == (2, 3)  # D and A, behind the head and B


def test_a_blend_that_fails_has_no_holes(warm: Engine) -> None:
    prompt = prompt_of(B, D, A)
    warm.arrive("other", prompt)
    job = warm.load("other")
    warm.side.on_outcomes([LoadOutcome("other", 20, 0, 0.1, None, "recompute failed")])
    warm.compute("other", prompt, job.first + 20)
    warm.finish("other")
    record = warm.book.get("other")
    assert record is not None
    assert (record.loaded_tokens, record.missing_chunks) == (20, ())


def test_the_record_names_the_holes_of_the_load_that_it_tells_of(warm: Engine) -> None:
    prompt = prompt_of(B, D, A)
    warm.arrive("other", prompt)
    succeed(warm, warm.load("other"))
    # Preempted; vLLM still has what was mended.
    succeed(warm, warm.load("other", local=130))
    warm.compute("other", prompt, 170)
    warm.finish("other")
    record = warm.book.get("other")
    assert record is not None
    assert record.missing_chunks == ()


def test_a_load_that_fails_leaves_an_exact_request(warm: Engine) -> None:
    prompt = prompt_of(C, A, B)
    warm.arrive("other", prompt)
    job = warm.load("other")
    outcome = LoadOutcome("other", 0, 0, 0.1, job.spans[1].variant, "store unavailable")
    warm.side.on_outcomes([outcome])
    assert warm.side.loadable_tokens("other", 0) == 0
    assert warm.side.approximate_from("other") is None
    saves = warm.compute("other", prompt)
    assert [s.info.provenance.exact for s in saves] == [True] * 3
    assert warm.finish("other")


def test_a_preempted_blend_stays_tainted_whatever_its_second_load_does(warm: Engine) -> None:
    prompt = prompt_of(C, A, B, D)
    warm.arrive("other", prompt)
    succeed(warm, warm.load("other"))
    # vLLM still has 64 tokens in blocks of its own, which are blended.
    job = warm.load("other", local=64)
    assert job.recompute is not None
    assert (job.first, job.recompute.exact_end) == (64, 64)
    outcome = LoadOutcome("other", 0, 0, 0.1, job.spans[0].variant, "store unavailable")
    warm.side.on_outcomes([outcome])
    (saved,) = warm.compute("other", prompt, 64)
    assert not saved.info.provenance.exact


def test_the_variant_that_fits_best_is_taken(engine: Engine) -> None:
    one, other = prompt_of(A, C), prompt_of(B, D, C)
    for name, prompt in (("one", one), ("other", other)):
        for save in engine.first_visit(name, prompt):
            before = save.origin.prefix_chunks[1:]
            attended = tuple(AttendedChunk(chunk, 50, 5.0) for chunk in before)
            length = save.info.num_tokens
            seen = ChunkObservation(attended, 1.0, (0.5,) * length)
            engine.store.seen[observation_key(save.span.variant)] = seen.to_bytes()
    engine.arrive("r", prompt_of(range(500, 520), B, D, C))
    job = engine.load("r")
    assert job.spans[-1].base_position == other.chunk_ends[1]
    engine.arrive("s", prompt_of(range(500, 520), A, C))
    assert engine.load("s").spans[-1].base_position == one.chunk_ends[0]


@pytest.mark.parametrize("outage", [Unavailable("cachestore", "gone"), None])
def test_without_observations_all_that_is_held_may_be_needed_alike(
    warm: Engine, outage: Exception | None
) -> None:
    warm.store.get_outage = outage
    key = next(iter(warm.store.stored))
    warm.store.seen[observation_key(key)] = b"garbled"
    warm.arrive("other", prompt_of(C, A))
    job = warm.load("other")
    assert job.recompute is not None
    assert {i for chunk in job.recompute.chunks for i in chunk.influence} == {1.0}


def test_scratch_is_given_back_whatever_became_of_the_request(warm: Engine) -> None:
    free = warm.pool.get_num_free_blocks()
    warm.arrive("other", prompt_of(C, A))
    job = warm.load("other")
    assert job.recompute is not None
    assert len(job.recompute.scratch_blocks) == 1  # for nine tokens
    assert warm.pool.get_num_free_blocks() == free - 1
    warm.finish("other")
    warm.side.on_outcomes([LoadOutcome("other", 0, 0, 0.1, None, "cancelled")])
    assert warm.pool.get_num_free_blocks() == free


def test_blocks_that_vllm_may_need_are_not_taken(warm: Engine) -> None:
    warm.pool.free = warm.pool.free[:25]  # a sixteenth of all
    warm.arrive("other", prompt_of(C, A))
    job = warm.load("other")
    assert job.recompute is not None
    assert job.recompute.scratch_blocks == ()
    warm.side.on_outcomes([LoadOutcome("other", 0, 0, 0.1, None, "cancelled")])
    assert warm.pool.get_num_free_blocks() == 25


def test_an_engine_that_cannot_blend_is_not_asked_twice(warm: Engine) -> None:
    warm.arrive("other", prompt_of(C, A))
    warm.load("other")
    warm.side.on_outcomes([LoadOutcome("other", 0, 0, 0.0, None, BLEND_UNSUPPORTED)])
    warm.arrive("next", prompt_of(C, A))
    assert warm.side.loadable_tokens("next", 0) == 0  # its head alone is not worth it


def test_chunks_are_observed_when_their_request_has_ended(engine: Engine) -> None:
    saves = engine.first_visit("first", FIRST)
    assert engine.finish("first")
    (job,) = engine.side.step([], lambda _: BLOCKS).observes
    assert job.segments == (range(20), range(20, 60), range(60, 110), range(110, 140))
    assert job.chunks == (b"", *(save.span.variant.chunk for save in saves[1:]))
    assert job.saves == {place: save for place, save in enumerate(saves) if place}
    assert job.blocks == BLOCKS[:9]
    assert tuple(job.token_ids) == FIRST.token_ids[:140]


def test_what_a_plan_has_exactly_between_chunks_ends_what_is_observed(engine: Engine) -> None:
    """No gateway plans that; a client of an engine without a key may."""
    prompt = prompt_of(*(range(n, n + 30) for n in range(100, 800, 100)))
    plan = plan_blend(prompt, SPACE, "public", "r", 0.2)
    blended = (1, 2, 6)
    segments = tuple(
        replace(segment, action=Action.BLEND if place in blended else Action.EXACT)
        for place, segment in enumerate(plan.segments)
    )
    engine.first_visit("r", prompt, segments=segments)
    assert engine.finish("r")
    (job,) = engine.side.step([], lambda _: BLOCKS).observes
    assert list(job.saves) == [1, 2]
    assert job.segments == (range(20), range(20, 50), range(50, 80))
    assert job.chunks[1:] == tuple(segment.chunk for segment in segments[1:3])
    assert len(job.token_ids) == 80


def test_only_a_few_blocks_are_kept_from_vllm(engine: Engine) -> None:
    engine.pool.num_gpu_blocks = 8 * 20
    kept = []
    for number in range(4):
        prompt = prompt_of(*(range(n + 1000 * number, n + 1000 * number + 60) for n in (0, 500)))
        engine.first_visit(str(number), prompt)  # nine blocks
        kept.append(engine.finish(str(number)))
    assert kept == [True, True, False, False]
    engine.side.on_released(["0"])
    engine.first_visit("last", prompt_of(range(9000, 9060)))
    assert engine.finish("last")


def test_a_request_that_saved_nothing_keeps_nothing(warm: Engine) -> None:
    warm.arrive("again", FIRST)
    job = warm.load("again")
    succeed(warm, job)
    assert warm.compute("again", FIRST, job.end) == []
    assert not warm.finish("again")


def test_blends_from_the_very_start_are_tainted_from_there(engine: Engine) -> None:
    def headless(*chunks: range) -> Prompt:
        return assemble([], chunks, TAIL)

    engine.first_visit("first", headless(A, B))
    prompt = headless(B, C, A)
    engine.arrive("other", prompt)
    assert engine.side.loadable_tokens("other", 0) == 120
    assert engine.side.approximate_from("other") == 0
    succeed(engine, engine.load("other"))
    job = engine.load("other", local=32)  # preempted; vLLM still has some of it
    outcome = LoadOutcome("other", 0, 0, 0.1, job.spans[0].variant, "store unavailable")
    engine.side.on_outcomes([outcome])
    saves = engine.compute("other", prompt, 32)
    assert [save.info.provenance.exact for save in saves] == [False]


def test_a_request_that_leaves_while_it_is_loaded_again_keeps_nothing(warm: Engine) -> None:
    """Its load is yet to be reported, and vLLM takes back the blocks of a request once."""
    prompt = prompt_of(A, D)
    warm.arrive("other", prompt)
    job = warm.load("other")
    succeed(warm, job)
    assert len(warm.compute("other", prompt, job.end)) == 1
    warm.load("other")  # it was preempted
    assert not warm.finish("other")


def test_a_request_whose_blocks_vllm_took_back_is_not_observed(engine: Engine) -> None:
    engine.first_visit("first", FIRST)
    assert not engine.side.on_finished("first", ())


def test_of_what_the_engine_does_not_hold_itself_half_must_be_held(warm: Engine) -> None:
    prompt = prompt_of(C, B, range(500, 580), A)
    warm.arrive("other", prompt)
    assert warm.side.loadable_tokens("other", 0) == prompt.chunk_ends[-1]
    assert warm.side.loadable_tokens("other", 96) == 0  # 80 of 124 would be computed
    assert warm.side.approximate_from("other") is None


def test_nothing_looks_where_nothing_may_be_computed(warm: Engine) -> None:
    warm.arrive("other", prompt_of(C, A), budget=0.0)
    job = warm.load("other")
    assert job.recompute is not None
    assert job.recompute.scratch_blocks == ()


def test_kept_blocks_are_let_go_when_vllm_runs_short(engine: Engine) -> None:
    engine.first_visit("first", FIRST)
    assert engine.finish("first")
    assert not engine.side.step([], lambda _: BLOCKS).release_kept_blocks
    engine.pool.free = engine.pool.free[:3]
    assert engine.side.step([], lambda _: BLOCKS).release_kept_blocks
    engine.side.on_released(["first"])
    assert not engine.side.step([], lambda _: BLOCKS).release_kept_blocks


def test_kept_blocks_are_let_go_when_the_queue_stands(engine: Engine) -> None:
    """vLLM finds too few blocks for its next request, though many are free."""
    engine.first_visit("first", FIRST)
    assert engine.finish("first")
    engine.arrive("next", prompt_of(C, A))
    assert engine.side.loadable_tokens("next", 0)
    engine.side.on_allocated("next", BLOCKS, 90)
    assert not engine.side.step([], lambda _: BLOCKS).release_kept_blocks
    assert engine.side.loadable_tokens("nobody's plan", 0) == 0
    assert engine.side.step([], lambda _: BLOCKS).release_kept_blocks
    assert not engine.side.step([], lambda _: BLOCKS).release_kept_blocks


def test_others_under_way_when_an_engine_turns_out_not_to_blend_lose_nothing(warm: Engine) -> None:
    free = warm.pool.get_num_free_blocks()
    for name in ("one", "two", "three"):
        warm.arrive(name, prompt_of(C, A))
        assert warm.side.loadable_tokens(name, 0)
    for name in ("one", "two"):
        warm.side.on_allocated(name, BLOCKS, 90)
        warm.side.step([], lambda _: BLOCKS)
    for name in ("one", "two"):
        warm.side.on_outcomes([LoadOutcome(name, 0, 0, 0.0, None, BLEND_UNSUPPORTED)])
    assert warm.pool.get_num_free_blocks() == free
    assert warm.side.loadable_tokens("three", 0) == 0
    warm.side.on_allocated("three", BLOCKS, 0)
    assert not warm.side.step([], lambda _: BLOCKS).loads


def measured(engine: Engine, *, recompute_s: float) -> None:
    """Let the engine learn: a token takes 1 ms to compute, and so long to recompute."""
    for tokens in (100, 200, 300, 400, 500):
        engine.side.on_passes([(tokens, 1e-3 * tokens)])
        engine.costs.observe_load({Tier.MEMORY: value_bytes(SPACE, tokens)}, 1e-5 * tokens)
        engine.costs.observe_recompute(tokens, recompute_s * tokens)


@pytest.mark.parametrize(("recompute_s", "pays"), [(1e-3, True), (1.0, False)])
def test_a_blend_is_made_where_it_is_faster(warm: Engine, recompute_s: float, pays: bool) -> None:
    measured(warm, recompute_s=recompute_s)
    prompt = prompt_of(C, A, B)
    warm.arrive("other", prompt)
    for _ in range(3):  # vLLM may ask more than once
        assert warm.side.loadable_tokens("other", 0) == (prompt.chunk_ends[-1] if pays else 0)
    if not pays:
        saves = warm.compute("other", prompt)
        assert all(save.info.provenance.exact for save in saves)
        warm.finish("other")
        record = warm.book.get("other")
        assert record is not None
        assert record.reported_miss == "computing is faster"


def test_chunks_of_a_slow_tier_are_computed_and_the_others_are_blended(warm: Engine) -> None:
    """Each is decided by itself: one within is mended as a hole, one at the end is left away."""
    measured(warm, recompute_s=1e-3)
    for tokens in (100, 200, 300, 400, 500):
        warm.costs.observe_load({Tier.DISK: value_bytes(SPACE, tokens)}, tokens)
    slow = [key for key in warm.store.stored if key.chunk == chunk_key(SPACE, "public", A)]
    assert slow
    for key in slow:
        warm.store.stored[key] = replace(warm.store.stored[key], tier=Tier.DISK)
    prompt = prompt_of(C, A, B)
    warm.arrive("within", prompt)
    job = warm.load("within")
    start, end = prompt.chunk_ends[:2]
    assert job.end == prompt.chunk_ends[-1]
    assert job.recompute is not None
    assert job.recompute.missing == (range(start, end),)
    assert not {span.variant for span in job.spans} & set(slow)
    succeed(warm, job, blended_tokens=110, recomputed_tokens=50, recompute_s=0.01)
    assert warm.compute("within", prompt, job.end) == []
    warm.finish("within")
    record = warm.book.get("within")
    assert record is not None
    assert record.missing_chunks == (), "it is held, and nobody has to compute it ahead"
    warm.arrive("behind", last := prompt_of(C, B, A))
    assert warm.side.loadable_tokens("behind", 0) == last.chunk_ends[-2]


def test_how_long_a_load_is_waited_for_follows_what_computing_takes(warm: Engine) -> None:
    prompt = prompt_of(C, A, B)

    def deadline_s(name: str) -> float:
        warm.arrive(name, prompt)
        return warm.load(name).deadline_s

    assert deadline_s("unknown") == 5.0
    warm.costs.use_profile(PROFILE)
    assert deadline_s("quick") == 2.0
    slow = PrefillProfile((0,), (1, 1000), ((0.01, 10.0),), 2048)
    warm.costs.use_profile(slow)
    assert deadline_s("slow") == pytest.approx(0.03 * prompt.chunk_ends[-1])


def test_loads_that_failed_before_they_were_late_teach_nothing(warm: Engine) -> None:
    measured(warm, recompute_s=1e-3)
    known = warm.costs.tier_bandwidths().get(Tier.MEMORY)
    for number in range(20):
        warm.arrive(f"gone-{number}", prompt_of(C, A, B))
        job = warm.load(f"gone-{number}")
        gone = LoadOutcome(job.request_id, 0, 0, 0.1, job.spans[0].variant, "store unavailable")
        warm.side.on_outcomes([gone])
    assert warm.costs.tier_bandwidths().get(Tier.MEMORY) == known
    warm.arrive("other", prompt_of(C, A, B))
    assert warm.side.loadable_tokens("other", 0)


@pytest.mark.parametrize("mended", [False, True])
def test_a_store_that_is_late_again_is_not_waited_for(warm: Engine, mended: bool) -> None:
    """Whether nothing came, or a part and the rest was mended."""
    measured(warm, recompute_s=1e-3)
    for number in range(TIMED_OUT_LOADS):
        warm.arrive(f"late-{number}", prompt_of(C, A, B))
        job = warm.load(f"late-{number}")
        late = LoadOutcome(
            job.request_id, 0, 0, 2.0, job.spans[0].variant, "load late", timed_out=True
        )
        if mended:
            late = replace(
                late,
                tokens=job.end,
                reason="",
                missing_variant=None,
                missing_ranges=(range(80, 140),),
            )
        warm.side.on_outcomes([late])
    warm.arrive("blended", prompt_of(C, A, B))
    warm.arrive("exact", FIRST)
    for name in ("blended", "exact"):
        assert warm.side.loadable_tokens(name, 0) == 0


def test_a_blend_of_very_many_chunks_is_decided_quickly() -> None:
    """What it costs to decide does not grow with the square of them."""
    engine = Engine()
    chunks = [range(100 * n, 100 * n + 20) for n in range(600)]
    first = prompt_of(*chunks)
    engine.first_visit("first", first)
    engine.finish("first")
    measured(engine, recompute_s=1e-3)
    asked = 0
    predict = engine.costs.predict_s

    def counted(reuse: ReuseOption, length: int) -> float | None:
        nonlocal asked
        asked += 1
        return predict(reuse, length)

    engine.costs.predict_s = counted  # type: ignore[method-assign]
    engine.arrive("other", prompt_of(*reversed(chunks)))
    assert engine.side.loadable_tokens("other", 0)
    assert 0 < asked < 40


def test_a_blend_that_is_asked_for_always_is_made_always() -> None:
    engine = Engine(load_always=True)
    engine.first_visit("first", FIRST)
    measured(engine, recompute_s=1.0)
    engine.arrive("other", prompt_of(C, A, B))
    assert engine.side.loadable_tokens("other", 0) == 140


@pytest.mark.parametrize(("alpha", "wanted"), [(0.0, 0), (0.1, 8), (0.2, 16), (None, 20), (9, 20)])
def test_a_plans_alpha_says_how_much_of_its_budget_is_spent(
    warm: Engine, alpha: float | None, wanted: int
) -> None:
    """Of what nobody has observed CCI is 1, so that it wants alpha."""
    prompt = prompt_of(C, B)
    warm.arrive("other", prompt, 0.25, alpha=alpha)
    job = warm.load("other")
    assert job.recompute is not None
    assert job.recompute.recompute_tokens == wanted


def test_nothing_of_a_trial_is_stored(warm: Engine) -> None:
    prompt = prompt_of(B, D, A, range(500, 540))
    warm.arrive("trial", prompt, trial=True)
    job = warm.load("trial")
    succeed(warm, job, blended_tokens=90, recomputed_tokens=80, recompute_s=0.5)
    assert warm.compute("trial", prompt, job.end) == []
    assert not warm.finish("trial")
    # Nor what is exact, where there is nothing to blend.
    assert warm.first_visit("asked", prompt_of(D, range(500, 600)), trial=True) == []


def test_a_trial_is_blended_even_where_that_is_slower_and_teaches_nothing(warm: Engine) -> None:
    warm.costs.use_profile(PROFILE)
    for tokens in range(100, 600, 100):
        warm.costs.observe_load({Tier.MEMORY: value_bytes(SPACE, tokens)}, 1e-5 * tokens)
        warm.costs.observe_recompute(tokens, tokens)
    prompt = prompt_of(C, B)
    warm.arrive("question", prompt)
    assert warm.side.loadable_tokens("question", 0) == 0
    before = warm.costs.tier_bandwidths().get(Tier.MEMORY)
    for number in range(9):
        warm.arrive(f"trial-{number}", prompt, trial=True)
        job = warm.load(f"trial-{number}")
        assert job.recompute is not None
        succeed(warm, job, blended_tokens=100, recomputed_tokens=20, recompute_s=1e-6)
    assert warm.costs.tier_bandwidths().get(Tier.MEMORY) == before
    warm.arrive("next", prompt)
    assert warm.side.loadable_tokens("next", 0) == 0
