"""What the scheduler half decides about prompts with chunks of other prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.plans import blend_for_all
from ragcache_core.blend.observation import ChunkObservation, observation_key
from ragcache_core.blend.prefix_overlap import AttendedChunk
from ragcache_core.cost.load_or_compute import TIMED_OUT_LOADS, ReuseOption
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey, chunk_key
from ragcache_core.identity.variant import Provenance, Tier, VariantInfo
from ragcache_core.plan.prompt import Prompt, assemble
from ragcache_core.plan.reuse_plan import Action
from ragcache_core.store_api import StoredVariant
from ragcache_engine.protocol.messages import (
    BLEND_UNSUPPORTED,
    LoadJob,
    LoadOutcome,
    MeasuredPass,
    StepReport,
)
from ragcache_engine.scheduler.lookup import MAX_CANDIDATES
from ragcache_kv.values.layout import value_bytes
from tests.kit.scheduler import (
    BLOCKS,
    PROFILE,
    SPACE,
    TAIL,
    TEMPLATE,
    A,
    B,
    BlendHarness,
    C,
    D,
)


def make_prompt(*chunks: range) -> Prompt:
    return assemble(TEMPLATE, chunks, TAIL)


FIRST = make_prompt(A, B, C)


@pytest.fixture
def engine() -> BlendHarness:
    return BlendHarness()


@pytest.fixture
def warm(engine: BlendHarness) -> BlendHarness:
    engine.run_first("first", FIRST)
    engine.finish("first")
    engine.scheduler.step([], lambda _: BLOCKS)
    engine.scheduler.on_released(["first"])
    return engine


def succeed(engine: BlendHarness, job: LoadJob, **given: Any) -> None:
    tokens = job.end - job.first
    engine.scheduler.on_outcomes([LoadOutcome(job.request_id, tokens, 99, 0.1, None, "", **given)])


def test_the_first_request_computes_and_saves_exact_variants(engine: BlendHarness) -> None:
    saves = engine.run_first("first", FIRST)
    assert [job.info.provenance.exact for job in saves] == [True] * 4
    assert engine.scheduler.approximate_from("first") is None


def test_the_same_prompt_is_loaded_exactly(warm: BlendHarness) -> None:
    warm.arrive("again", FIRST)
    job = warm.load("again")
    assert (job.end, job.recompute) == (FIRST.chunk_ends[-1], None)
    assert warm.scheduler.approximate_from("again") is None


def test_chunks_are_loaded_from_other_positions_and_prefixes(warm: BlendHarness) -> None:
    prompt = make_prompt(C, A, B)
    warm.arrive("other", prompt)
    assert warm.scheduler.loadable_tokens("other", 0) == prompt.chunk_ends[-1]
    assert warm.scheduler.approximate_from("other") == len(TEMPLATE)
    job = warm.load("other")
    assert [(s.start, s.end, s.base_position) for s in job.spans] == [
        (0, 20, 0),
        (20, 50, 110),
        (50, 90, 20),
        (90, 140, 60),
    ]
    # The store learns how well each variant fits.
    assert job.spans[0].fix_overhead == 0.0
    assert all(0.0 < span.fix_overhead <= 1.0 for span in job.spans[1:])
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


def test_a_template_and_first_chunk_at_their_own_positions_stay_exact(warm: BlendHarness) -> None:
    warm.arrive("other", make_prompt(A, C))
    job = warm.load("other")
    assert job.recompute is not None
    assert job.recompute.exact_end == 60
    assert [chunk.start for chunk in job.recompute.chunks] == [60]


def test_with_few_stored_chunks_all_is_computed_and_exact(warm: BlendHarness) -> None:
    teach(warm)
    prompt = make_prompt(D, range(500, 700), C)
    saves = warm.run_first("other", prompt)
    assert [(save.span.start, save.info.provenance.exact) for save in saves] == [
        (20, True),
        (80, True),
        (280, True),
    ]


def test_a_missing_chunk_is_recomputed_between_others_and_prefilled_at_the_end(
    warm: BlendHarness,
) -> None:
    warm.arrive("other", make_prompt(B, D, A, range(500, 540)))
    job = warm.load("other")
    assert job.recompute is not None
    assert job.recompute.missing == (range(70, 130),)
    assert job.end == 170
    assert [span.start for span in job.spans] == [0, 20, 130]


def test_after_a_blend_only_chunks_without_a_variant_are_saved_as_approximate(
    warm: BlendHarness,
) -> None:
    last = range(500, 540)
    prompt = make_prompt(B, D, A, last)
    warm.arrive("other", prompt)
    job = warm.load("other")
    succeed(warm, job, blended_tokens=90, recomputed_tokens=80, recompute_s=0.5)
    saves = warm.compute("other", prompt, job.end)
    assert [(s.span.start, s.info.provenance.exact) for s in saves] == [(70, False), (170, False)]
    assert not warm.finish("other")  # no chunk is observed
    record = warm.records.get("other")
    assert record is not None
    assert (record.blended_tokens, record.recomputed_tokens, record.recompute_s) == (90, 80, 0.5)
    assert record.miss == ""
    # An approximate variant serves blends and counts as computed nowhere.
    warm.arrive("next", make_prompt(B, D))
    again = warm.load("next")
    assert again.recompute is not None
    assert len(again.spans) == 3


def test_the_record_lists_missing_chunks_and_those_that_did_not_arrive(warm: BlendHarness) -> None:
    prompt = make_prompt(B, D, A, C, range(500, 540))
    warm.arrive("other", prompt)
    job = warm.load("other")
    assert job.recompute is not None
    assert job.recompute.missing == (range(70, 130),)
    succeed(warm, job, missing_ranges=(range(130, 170),))
    warm.compute("other", prompt, job.end)
    warm.finish("other")
    record = warm.records.get("other")
    assert record is not None
    assert record.missing_chunks == (2, 3)  # D and A, after the template and B


def test_a_failed_blend_has_no_missing_chunks(warm: BlendHarness) -> None:
    prompt = make_prompt(B, D, A)
    warm.arrive("other", prompt)
    job = warm.load("other")
    warm.scheduler.on_outcomes([LoadOutcome("other", 20, 0, 0.1, None, "recompute failed")])
    warm.compute("other", prompt, job.first + 20)
    warm.finish("other")
    record = warm.records.get("other")
    assert record is not None
    assert (record.loaded_tokens, record.missing_chunks) == (20, ())


def test_the_record_lists_the_missing_chunks_of_its_own_load(warm: BlendHarness) -> None:
    prompt = make_prompt(B, D, A)
    warm.arrive("other", prompt)
    succeed(warm, warm.load("other"))
    # Preempted. vLLM still has the recomputed tokens.
    succeed(warm, warm.load("other", local=130))
    warm.compute("other", prompt, 170)
    warm.finish("other")
    record = warm.records.get("other")
    assert record is not None
    assert record.missing_chunks == ()


def test_a_failed_load_leaves_an_exact_request(warm: BlendHarness) -> None:
    prompt = make_prompt(C, A, B)
    warm.arrive("other", prompt)
    job = warm.load("other")
    outcome = LoadOutcome("other", 0, 0, 0.1, job.spans[1].variant, "store unavailable")
    warm.scheduler.on_outcomes([outcome])
    assert warm.scheduler.loadable_tokens("other", 0) == 0
    assert warm.scheduler.approximate_from("other") is None
    saves = warm.compute("other", prompt)
    assert [s.info.provenance.exact for s in saves] == [True] * 3
    assert warm.finish("other")


def test_a_preempted_blend_stays_approximate_if_its_second_load_fails(warm: BlendHarness) -> None:
    prompt = make_prompt(C, A, B, D)
    warm.arrive("other", prompt)
    succeed(warm, warm.load("other"))
    # vLLM still has 64 blended tokens in its blocks.
    job = warm.load("other", local=64)
    assert job.recompute is not None
    assert (job.first, job.recompute.exact_end) == (64, 64)
    outcome = LoadOutcome("other", 0, 0, 0.1, job.spans[0].variant, "store unavailable")
    warm.scheduler.on_outcomes([outcome])
    (saved,) = warm.compute("other", prompt, 64)
    assert not saved.info.provenance.exact


def test_the_best_fitting_variant_is_chosen(engine: BlendHarness) -> None:
    teach(engine)
    one, other = make_prompt(A, C), make_prompt(range(600, 800), B, D, C)
    for name, prompt in (("one", one), ("other", other)):
        for save in engine.run_first(name, prompt):
            before = save.origin.prefix_chunks[1:]
            attended = tuple(AttendedChunk(chunk, 50, 5.0) for chunk in before)
            length = save.info.num_tokens
            seen = ChunkObservation(attended, 1.0, (0.5,) * length)
            engine.store.seen[observation_key(save.span.variant)] = seen.to_bytes()
    engine.arrive("r", make_prompt(range(500, 520), B, D, C))
    job = engine.load("r")
    assert job.spans[-1].base_position == other.chunk_ends[2]
    engine.arrive("s", make_prompt(range(500, 520), A, C))
    assert engine.load("s").spans[-1].base_position == one.chunk_ends[0]


def test_the_best_fitting_of_many_variants_is_chosen(engine: BlendHarness) -> None:
    """Whichever of them the store returns first."""
    teach(engine)
    last = chunk_key(SPACE, "public", D)
    firsts = [range(1000 * n, 1000 * n + 40) for n in range(1, 3 * MAX_CANDIDATES)]
    for n, first in enumerate(firsts):
        head, before = (chunk_key(SPACE, "public", one) for one in (TEMPLATE, first))
        engine.arrive("r", make_prompt(first))
        engine.scheduler.loadable_tokens("r", 0)
        engine.compute("r", make_prompt(first))
        engine.finish("r")
        # The position tells which variant a load uses.
        info = VariantInfo(len(D), 9, 1000 + n, Provenance(exact=True))
        key = VariantKey(last, bytes([n]) * 16)
        engine.store.stored[key] = StoredVariant(
            key, info, Tier.MEMORY, prefix_chunks=(head, before)
        )
        seen = ChunkObservation((AttendedChunk(before, 40, 5.0),), 1.0, (0.5,) * len(D))
        engine.store.seen[observation_key(key)] = seen.to_bytes()
    for n, first in enumerate(firsts):
        engine.arrive("r", make_prompt(first, D))
        assert engine.load("r").spans[-1].base_position == 1000 + n
        engine.finish("r")


@pytest.mark.parametrize("outage", [Unavailable("cachestore", "gone"), None])
def test_without_observations_all_tokens_have_the_same_influence(
    warm: BlendHarness, outage: Exception | None
) -> None:
    warm.store.get_outage = outage
    key = next(iter(warm.store.stored))
    warm.store.seen[observation_key(key)] = b"garbled"
    warm.arrive("other", make_prompt(C, A))
    job = warm.load("other")
    assert job.recompute is not None
    assert {i for chunk in job.recompute.chunks for i in chunk.influence} == {1.0}


def test_scratch_blocks_are_freed_when_the_request_has_ended(warm: BlendHarness) -> None:
    free = warm.pool.get_num_free_blocks()
    warm.arrive("other", make_prompt(C, A))
    job = warm.load("other")
    assert job.recompute is not None
    assert len(job.recompute.scratch_blocks) == 1  # for nine tokens
    assert warm.pool.get_num_free_blocks() == free - 1
    warm.finish("other")
    warm.scheduler.on_outcomes([LoadOutcome("other", 0, 0, 0.1, None, "cancelled")])
    assert warm.pool.get_num_free_blocks() == free


def test_scratch_blocks_are_not_allocated_if_vllm_may_need_them(warm: BlendHarness) -> None:
    warm.pool.free = warm.pool.free[:25]  # a sixteenth of all
    warm.arrive("other", make_prompt(C, A))
    job = warm.load("other")
    assert job.recompute is not None
    assert job.recompute.scratch_blocks == ()
    warm.scheduler.on_outcomes([LoadOutcome("other", 0, 0, 0.1, None, "cancelled")])
    assert warm.pool.get_num_free_blocks() == 25


def test_an_engine_that_cannot_blend_is_asked_only_once(warm: BlendHarness) -> None:
    warm.arrive("other", make_prompt(C, A))
    warm.load("other")
    warm.scheduler.on_outcomes([LoadOutcome("other", 0, 0, 0.0, None, BLEND_UNSUPPORTED)])
    warm.arrive("next", make_prompt(C, A))
    assert warm.scheduler.loadable_tokens("next", 0) == 0  # the template alone has too few tokens


def test_chunks_are_observed_after_their_request_has_ended(engine: BlendHarness) -> None:
    saves = engine.run_first("first", FIRST)
    assert engine.finish("first")
    (job,) = engine.scheduler.step([], lambda _: BLOCKS).observes
    assert job.segments == (range(20), range(20, 60), range(60, 110), range(110, 140))
    assert job.chunks == (b"", *(save.span.variant.chunk for save in saves[1:]))
    assert job.saves == {index: save for index, save in enumerate(saves) if index}
    assert job.blocks == BLOCKS[:9]
    assert list(job.token_ids) == list(FIRST.token_ids[:140])


def test_an_exact_segment_between_chunks_ends_the_observation(engine: BlendHarness) -> None:
    """No gateway makes such a plan, but any client of an engine without a key can."""
    prompt = make_prompt(*(range(n, n + 30) for n in range(100, 800, 100)))
    plan = blend_for_all(prompt, SPACE, "public", "r", 0.2)
    blended = (1, 2, 6)
    segments = tuple(
        replace(segment, action=Action.BLEND if index in blended else Action.EXACT)
        for index, segment in enumerate(plan.segments)
    )
    engine.run_first("r", prompt, segments=segments)
    assert engine.finish("r")
    (job,) = engine.scheduler.step([], lambda _: BLOCKS).observes
    assert list(job.saves) == [1, 2]
    assert job.segments == (range(20), range(20, 50), range(50, 80))
    assert job.chunks[1:] == tuple(segment.chunk for segment in segments[1:3])
    assert len(job.token_ids) == 80


def test_only_a_few_blocks_are_kept(engine: BlendHarness) -> None:
    engine.pool.num_gpu_blocks = 8 * 20
    kept = []
    for number in range(4):
        prompt = make_prompt(*(range(n + 1000 * number, n + 1000 * number + 60) for n in (0, 500)))
        engine.run_first(str(number), prompt)  # nine blocks
        kept.append(engine.finish(str(number)))
    assert kept == [True, True, False, False]
    engine.scheduler.on_released(["0"])
    engine.run_first("last", make_prompt(range(9000, 9060)))
    assert engine.finish("last")


def test_a_request_without_saves_keeps_no_blocks(warm: BlendHarness) -> None:
    warm.arrive("again", FIRST)
    job = warm.load("again")
    succeed(warm, job)
    assert warm.compute("again", FIRST, job.end) == []
    assert not warm.finish("again")


def test_a_blend_without_a_template_is_approximate_from_position_0(engine: BlendHarness) -> None:
    def headless(*chunks: range) -> Prompt:
        return assemble([], chunks, TAIL)

    engine.run_first("first", headless(A, B))
    prompt = headless(B, C, A)
    engine.arrive("other", prompt)
    assert engine.scheduler.loadable_tokens("other", 0) == 120
    assert engine.scheduler.approximate_from("other") == 0
    succeed(engine, engine.load("other"))
    job = engine.load("other", local=32)  # preempted, vLLM still has some of it
    outcome = LoadOutcome("other", 0, 0, 0.1, job.spans[0].variant, "store unavailable")
    engine.scheduler.on_outcomes([outcome])
    saves = engine.compute("other", prompt, 32)
    assert [save.info.provenance.exact for save in saves] == [False]


def test_a_request_that_ends_during_a_second_load_keeps_no_blocks(warm: BlendHarness) -> None:
    """Its load is not reported yet, and vLLM takes back the blocks of a request only once."""
    prompt = make_prompt(A, D)
    warm.arrive("other", prompt)
    job = warm.load("other")
    succeed(warm, job)
    assert len(warm.compute("other", prompt, job.end)) == 1
    warm.load("other")  # vLLM preempted it
    assert not warm.finish("other")


def test_a_request_without_blocks_is_not_observed(engine: BlendHarness) -> None:
    engine.run_first("first", FIRST)
    assert not engine.scheduler.on_finished("first", ())


def test_without_a_recompute_share_no_question_attends(warm: BlendHarness) -> None:
    warm.arrive("other", make_prompt(C, A), recompute_share=0.0)
    job = warm.load("other")
    assert job.recompute is not None
    assert job.recompute.scratch_blocks == ()


def test_kept_blocks_are_released_when_vllm_runs_short(engine: BlendHarness) -> None:
    engine.run_first("first", FIRST)
    assert engine.finish("first")
    assert not engine.scheduler.step([], lambda _: BLOCKS).release_kept_blocks
    engine.pool.free = engine.pool.free[:3]
    assert engine.scheduler.step([], lambda _: BLOCKS).release_kept_blocks
    engine.scheduler.on_released(["first"])
    assert not engine.scheduler.step([], lambda _: BLOCKS).release_kept_blocks


def test_kept_blocks_are_released_when_an_allocation_fails(engine: BlendHarness) -> None:
    """vLLM has too few blocks for its next request, though many are free."""
    engine.run_first("first", FIRST)
    assert engine.finish("first")
    engine.arrive("next", make_prompt(C, A))
    assert engine.scheduler.loadable_tokens("next", 0)
    engine.scheduler.on_allocated("next", BLOCKS, 90)
    assert not engine.scheduler.step([], lambda _: BLOCKS).release_kept_blocks
    assert engine.scheduler.loadable_tokens("no plan", 0) == 0
    assert engine.scheduler.step([], lambda _: BLOCKS).release_kept_blocks
    assert not engine.scheduler.step([], lambda _: BLOCKS).release_kept_blocks


def test_requests_in_flight_survive_when_blending_is_disabled(warm: BlendHarness) -> None:
    free = warm.pool.get_num_free_blocks()
    for name in ("one", "two", "three"):
        warm.arrive(name, make_prompt(C, A))
        assert warm.scheduler.loadable_tokens(name, 0)
    for name in ("one", "two"):
        warm.scheduler.on_allocated(name, BLOCKS, 90)
        warm.scheduler.step([], lambda _: BLOCKS)
    for name in ("one", "two"):
        warm.scheduler.on_outcomes([LoadOutcome(name, 0, 0, 0.0, None, BLEND_UNSUPPORTED)])
    assert warm.pool.get_num_free_blocks() == free
    assert warm.scheduler.loadable_tokens("three", 0) == 0
    warm.scheduler.on_allocated("three", BLOCKS, 0)
    assert not warm.scheduler.step([], lambda _: BLOCKS).loads


def teach(engine: BlendHarness, *, select_s: float = 1e-5) -> None:
    """Let the engine learn that a token takes 1 ms to compute, and select_s in a selection."""
    for tokens in (100, 200, 300, 400, 500):
        engine.scheduler.on_reports([StepReport(passes=[MeasuredPass(tokens, 1e-3 * tokens)])])
        engine.costs.observe_load({Tier.MEMORY: value_bytes(SPACE, tokens)}, 1e-5 * tokens)
        engine.costs.observe_selection(tokens, select_s * tokens)


@pytest.mark.parametrize(("select_s", "is_faster"), [(1e-5, True), (1.0, False)])
def test_a_blend_is_made_only_if_it_is_faster(
    warm: BlendHarness, select_s: float, is_faster: bool
) -> None:
    teach(warm, select_s=select_s)
    prompt = make_prompt(C, A, B)
    warm.arrive("other", prompt)
    for _ in range(3):  # vLLM may ask more than once
        assert warm.scheduler.loadable_tokens("other", 0) == (
            prompt.chunk_ends[-1] if is_faster else 0
        )
    if not is_faster:
        saves = warm.compute("other", prompt)
        assert all(save.info.provenance.exact for save in saves)
        warm.finish("other")
        record = warm.records.get("other")
        assert record is not None
        assert record.reported_miss == "computing is faster"


def test_chunks_of_a_slow_tier_are_computed_and_the_others_are_blended(warm: BlendHarness) -> None:
    """Inside the prompt such a chunk is recomputed, at the end the load stops before it."""
    teach(warm)
    for tokens in (100, 200, 300, 400, 500):
        warm.costs.observe_load({Tier.DISK: value_bytes(SPACE, tokens)}, tokens)
    slow = [key for key in warm.store.stored if key.chunk == chunk_key(SPACE, "public", A)]
    assert slow
    for key in slow:
        warm.store.stored[key] = replace(warm.store.stored[key], tier=Tier.DISK)
    prompt = make_prompt(C, A, B)
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
    record = warm.records.get("within")
    assert record is not None
    assert record.missing_chunks == (), "the store has it, so it need not be precomputed"
    warm.arrive("at the end", last := make_prompt(C, B, A))
    assert warm.scheduler.loadable_tokens("at the end", 0) == last.chunk_ends[-2]


def test_a_loads_deadline_follows_the_time_to_compute(warm: BlendHarness) -> None:
    prompt = make_prompt(C, A, B)

    def deadline_s(name: str) -> float:
        warm.arrive(name, prompt)
        return warm.load(name).deadline_s

    assert deadline_s("unknown") == 5.0
    warm.costs.use_profile(PROFILE)
    assert deadline_s("quick") == 2.0
    slow = PrefillProfile((0,), (1, 1000), ((0.01, 10.0),), 2048)
    warm.costs.use_profile(slow)
    assert deadline_s("slow") == pytest.approx(0.03 * prompt.chunk_ends[-1])


def test_loads_that_failed_early_update_no_prediction(warm: BlendHarness) -> None:
    teach(warm)
    known = warm.costs.tier_bandwidths().get(Tier.MEMORY)
    for number in range(20):
        warm.arrive(f"gone-{number}", make_prompt(C, A, B))
        job = warm.load(f"gone-{number}")
        gone = LoadOutcome(job.request_id, 0, 0, 0.1, job.spans[0].variant, "store unavailable")
        warm.scheduler.on_outcomes([gone])
    assert warm.costs.tier_bandwidths().get(Tier.MEMORY) == known
    warm.arrive("other", make_prompt(C, A, B))
    assert warm.scheduler.loadable_tokens("other", 0)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_store_that_times_out_twice_is_bypassed(warm: BlendHarness, recomputed: bool) -> None:
    """Whether nothing arrived, or the missing part was recomputed."""
    teach(warm)
    for number in range(TIMED_OUT_LOADS):
        warm.arrive(f"slow-{number}", make_prompt(C, A, B))
        job = warm.load(f"slow-{number}")
        outcome = LoadOutcome(
            job.request_id, 0, 0, 2.0, job.spans[0].variant, "load timed out", timed_out=True
        )
        if recomputed:
            outcome = replace(
                outcome,
                tokens=job.end,
                reason="",
                missing_variant=None,
                missing_ranges=(range(80, 140),),
            )
        warm.scheduler.on_outcomes([outcome])
    warm.arrive("blended", make_prompt(C, A, B))
    warm.arrive("exact", FIRST)
    for name in ("blended", "exact"):
        assert warm.scheduler.loadable_tokens(name, 0) == 0


def test_a_decision_about_many_chunks_takes_few_predictions() -> None:
    """The number of predictions does not grow with the square of the number of chunks."""
    engine = BlendHarness()
    chunks = [range(100 * n, 100 * n + 20) for n in range(600)]
    first = make_prompt(*chunks)
    engine.run_first("first", first)
    engine.finish("first")
    teach(engine)
    asked = 0
    predict = engine.costs.predict_s

    def counted(option: ReuseOption, length: int) -> float | None:
        nonlocal asked
        asked += 1
        return predict(option, length)

    engine.costs.predict_s = counted  # type: ignore[method-assign]
    engine.arrive("other", make_prompt(*reversed(chunks)))
    assert engine.scheduler.loadable_tokens("other", 0)
    assert 0 < asked < 40


def test_with_load_always_a_slow_blend_is_made() -> None:
    engine = BlendHarness(load_always=True)
    engine.run_first("first", FIRST)
    teach(engine, select_s=1.0)
    engine.arrive("other", make_prompt(C, A, B))
    assert engine.scheduler.loadable_tokens("other", 0) == 140


@pytest.mark.parametrize(
    ("alpha", "num_tokens"), [(0.0, 0), (0.1, 8), (0.2, 16), (None, 20), (9, 20)]
)
def test_a_plans_alpha_sets_how_many_tokens_are_recomputed(
    warm: BlendHarness, alpha: float | None, num_tokens: int
) -> None:
    """The CCI of a chunk without an observation is 1, so its share is alpha."""
    prompt = make_prompt(C, B)
    warm.arrive("other", prompt, 0.25, alpha=alpha)
    job = warm.load("other")
    assert job.recompute is not None
    assert job.recompute.recompute_tokens == num_tokens


def test_a_trial_saves_nothing(warm: BlendHarness) -> None:
    prompt = make_prompt(B, D, A, range(500, 540))
    warm.arrive("trial", prompt, trial=True)
    job = warm.load("trial")
    succeed(warm, job, blended_tokens=90, recomputed_tokens=80, recompute_s=0.5)
    assert warm.compute("trial", prompt, job.end) == []
    assert not warm.finish("trial")
    # It saves no exact variant either, if there is nothing to blend.
    assert warm.run_first("asked", make_prompt(D, range(500, 600)), trial=True) == []


def test_a_trial_is_blended_even_if_slower_and_updates_no_prediction(warm: BlendHarness) -> None:
    warm.costs.use_profile(PROFILE)
    for tokens in range(100, 600, 100):
        warm.costs.observe_load({Tier.MEMORY: value_bytes(SPACE, tokens)}, 1e-5 * tokens)
        warm.costs.observe_selection(tokens, tokens)
    prompt = make_prompt(C, B)
    warm.arrive("question", prompt)
    assert warm.scheduler.loadable_tokens("question", 0) == 0
    before = warm.costs.tier_bandwidths().get(Tier.MEMORY)
    for number in range(9):
        warm.arrive(f"trial-{number}", prompt, trial=True)
        job = warm.load(f"trial-{number}")
        assert job.recompute is not None
        succeed(warm, job, blended_tokens=100, recomputed_tokens=20, recompute_s=1e-6)
    assert warm.costs.tier_bandwidths().get(Tier.MEMORY) == before
    warm.arrive("next", prompt)
    assert warm.scheduler.loadable_tokens("next", 0) == 0


def test_the_first_pass_after_a_load_recomputes_what_the_worker_left(warm: BlendHarness) -> None:
    prompt = make_prompt(C, A)
    warm.arrive("other", prompt)
    job = warm.load("other")
    runs = (range(30, 40), range(60, 62))
    succeed(
        warm,
        job,
        blended_tokens=70,
        recomputed_tokens=12,
        recompute_s=0.1,
        select_s=0.1,
        left_to_recompute=runs,
    )
    length = len(prompt.token_ids)
    jobs = warm.scheduler.step([("other", job.end, length - job.end)], lambda _: BLOCKS)
    [joint] = jobs.joint_recomputes
    assert (joint.runs, joint.blocks, joint.token_ids) == (runs, BLOCKS, prompt.token_ids)
    assert jobs.recompute_tokens == 12
    assert jobs.num_tokens == length - job.end
    assert not warm.scheduler.step([("other", length, 1)], lambda _: BLOCKS).joint_recomputes
    record = warm.records.get("other")
    assert record is not None
    assert record.recompute_s > 0.1, "with its share of the pass"
    assert record.recompute_s <= record.load_s + 0.1


def test_a_load_that_is_repeated_forgets_what_was_left(warm: BlendHarness) -> None:
    """vLLM took the blocks away before the request's first pass."""
    prompt = make_prompt(C, A)
    warm.arrive("other", prompt)
    job = warm.load("other")
    succeed(warm, job, blended_tokens=70, recomputed_tokens=9, left_to_recompute=(range(30, 39),))
    assert warm.scheduler.loadable_tokens("other", 0)
    again = warm.load("other")
    succeed(warm, again, blended_tokens=70, recomputed_tokens=0)
    jobs = warm.scheduler.step([("other", again.end, 1)], lambda _: BLOCKS)
    assert jobs.joint_recomputes == ()


def test_the_record_explains_each_segment_of_a_blend(warm: BlendHarness) -> None:
    prompt = make_prompt(C, D, A)
    warm.arrive("other", prompt)
    job = warm.load("other")
    succeed(warm, job, blended_tokens=job.end - len(TEMPLATE), left_to_recompute=(range(25, 30),))
    warm.scheduler.step([("other", job.end, len(prompt.token_ids) - job.end)], lambda _: BLOCKS)
    warm.finish("other")
    record = warm.records.get("other")
    assert record is not None
    head, first, missing, last = record.segments
    assert (head.loaded_tokens, head.blended, head.reason) == (len(TEMPLATE), False, "")
    assert (first.loaded_tokens, first.blended, first.recomputed_tokens) == (len(C), True, 5)
    assert first.source is not None
    assert first.source.base_position == len(TEMPLATE) + len(A) + len(B)
    assert (missing.loaded_tokens, missing.reason) == (0, "never stored")
    assert missing.recomputed_tokens == len(D)
    assert (last.loaded_tokens, last.blended) == (len(A), True)
