"""Which variants the scheduler half loads and saves, and when."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ragcache_core.access.reader import NO_READER
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import (
    Codec,
    Influence,
    Miss,
    Origin,
    Precision,
    Provenance,
    Tier,
)
from ragcache_core.plan.prompt import Prompt, plan_compute, plan_exact
from ragcache_engine.protocol.messages import ComputedRange, LoadOutcome
from ragcache_engine.scheduler.lookup import LookupExecutor, LookupResult
from ragcache_engine.scheduler.request import NewRequest
from ragcache_engine.scheduler.waiting_requests import RENEW_S, WaitingRequests
from ragcache_kv.store_client.shard_router import ShardedLookup
from tests.kit.clock import ManualClock
from tests.kit.scheduler import (
    AS_OF,
    BLOCKS,
    LENGTH,
    PROMPT,
    SPACE,
    SchedulerHarness,
)
from tests.kit.wait import wait_until


@pytest.mark.parametrize("pieces", [1, 3, 7])
def test_each_segment_is_saved_once_in_the_step_that_completes_it(
    engine: SchedulerHarness, pieces: int
) -> None:
    engine.arrive("r")
    assert engine.scheduler.loadable_tokens("r", 0) == 0
    engine.scheduler.on_allocated("r", BLOCKS, 0)
    saved = engine.prefill("r", pieces=pieces)
    assert len(saved) == len(set(saved)) == 4
    assert all(held.info.provenance.exact for held in engine.store.stored.values())


def test_all_chunks_are_loaded_and_the_question_is_computed(warm: SchedulerHarness) -> None:
    warm.arrive("again")
    chunks_end = PROMPT.chunk_ends[-1]
    assert warm.scheduler.loadable_tokens("again", 0) == chunks_end
    warm.scheduler.on_allocated("again", BLOCKS, chunks_end)
    (job,) = warm.scheduler.step([], lambda _: BLOCKS).loads
    assert (job.first, job.end, len(job.spans)) == (0, chunks_end, 4)
    outcome = LoadOutcome("again", chunks_end, 4096, 0.01, None, "")
    warm.scheduler.on_outcomes([outcome])
    warm.scheduler.on_allocated("again", BLOCKS, 0)
    assert warm.prefill("again", computed=chunks_end) == []
    warm.scheduler.on_finished("again", BLOCKS)
    record = warm.record("again")
    assert (record.loaded_tokens, record.loaded_bytes, record.miss) == (chunks_end, 4096, "")


def test_locally_cached_tokens_are_not_loaded(warm: SchedulerHarness) -> None:
    warm.arrive("again")
    assert warm.scheduler.loadable_tokens("again", 32) == PROMPT.chunk_ends[-1] - 32
    warm.scheduler.on_allocated("again", BLOCKS, PROMPT.chunk_ends[-1] - 32)
    (job,) = warm.scheduler.step([], lambda _: BLOCKS).loads
    # The template ends at 20, so only the tokens from 32 on of the first chunk are loaded.
    assert (job.first, job.spans[0].start) == (32, 20)


def test_a_few_tokens_are_computed_rather_than_loaded(warm: SchedulerHarness) -> None:
    warm.arrive("again")
    assert warm.scheduler.loadable_tokens("again", PROMPT.chunk_ends[-1] - 4) == 0


def test_the_last_token_of_a_prompt_is_always_computed(warm: SchedulerHarness) -> None:
    whole = Prompt(PROMPT.token_ids[: PROMPT.chunk_ends[-1]], PROMPT.head, PROMPT.chunk_ends)
    warm.arrive("no-question", whole)
    assert warm.scheduler.loadable_tokens("no-question", 0) == len(whole.token_ids) - 1


def test_a_load_ends_before_the_first_missing_variant(warm: SchedulerHarness) -> None:
    warm.arrive("probe")
    keys = list(warm.store.stored)
    del warm.store.stored[keys[2]]
    warm.arrive("again")
    assert warm.scheduler.loadable_tokens("again", 0) == PROMPT.chunk_ends[0]
    warm.scheduler.on_allocated("again", BLOCKS, PROMPT.chunk_ends[0])
    assert warm.prefill("again", computed=PROMPT.chunk_ends[0]) == [keys[2]]


def test_an_approximate_variant_never_serves_exact(warm: SchedulerHarness) -> None:
    keys = list(warm.store.stored)
    held = warm.store.stored[keys[1]]
    approximate = replace(held.info, provenance=Provenance(exact=False))
    warm.store.stored[keys[1]] = replace(held, info=approximate)
    warm.arrive("again")
    assert warm.scheduler.loadable_tokens("again", 0) == PROMPT.head
    # The exact variant that this request computes replaces it.
    warm.scheduler.on_allocated("again", BLOCKS, PROMPT.head)
    assert keys[1] in warm.prefill("again", computed=PROMPT.head)


def test_another_access_domain_does_not_find_the_variants(warm: SchedulerHarness) -> None:
    plan = plan_exact(PROMPT, SPACE, "tenant", "r").encode()
    warm.scheduler.on_new_request(NewRequest("r", PROMPT.token_ids, {"ragcache": plan}))
    assert warm.scheduler.loadable_tokens("r", 0) == 0


def test_reuse_off_neither_loads_nor_saves(warm: SchedulerHarness) -> None:
    plan = plan_compute(PROMPT, SPACE, "public", "off").encode()
    warm.store.stored.clear()
    warm.scheduler.on_new_request(NewRequest("off", PROMPT.token_ids, {"ragcache": plan}))
    assert warm.scheduler.loadable_tokens("off", 0) == 0
    warm.scheduler.on_allocated("off", BLOCKS, 0)
    assert warm.prefill("off") == []


def test_after_a_failed_load_the_request_is_computed_and_saved_again(
    warm: SchedulerHarness,
) -> None:
    warm.arrive("again")
    tokens = warm.scheduler.loadable_tokens("again", 0)
    assert tokens
    warm.scheduler.on_allocated("again", BLOCKS, tokens)
    (job,) = warm.scheduler.step([], lambda _: BLOCKS).loads
    missing = job.spans[2].variant
    del warm.store.stored[missing]
    outcome = LoadOutcome("again", job.spans[1].end, 100, 0.01, missing, "corrupt")
    warm.scheduler.on_outcomes([outcome])
    assert warm.scheduler.loadable_tokens("again", 32) == 0
    warm.scheduler.on_allocated("again", BLOCKS, 0)
    assert missing in warm.prefill("again", computed=32)
    warm.scheduler.on_finished("again", BLOCKS)
    assert warm.record("again").miss == "corrupt"


def test_a_preempted_request_is_loaded_again_and_its_record_does_not_change(
    warm: SchedulerHarness,
) -> None:
    warm.arrive("r")
    tokens = warm.scheduler.loadable_tokens("r", 0)
    assert tokens
    warm.scheduler.on_allocated("r", BLOCKS, tokens)
    warm.scheduler.step([], lambda _: BLOCKS)
    warm.scheduler.on_outcomes([LoadOutcome("r", tokens, 4096, 0.01, None, "")])
    warm.scheduler.on_allocated("r", BLOCKS, 0)
    assert warm.prefill("r", computed=tokens) == []
    warm.scheduler.step([("r", LENGTH, 1)], lambda _: BLOCKS)
    told = replace(warm.record("r"))
    # Preempted while it decodes: vLLM asks again, now with the tokens of the answer.
    assert warm.scheduler.loadable_tokens("r", 0) == tokens
    warm.scheduler.on_allocated("r", BLOCKS[::-1], tokens)
    (job,) = warm.scheduler.step([], lambda _: BLOCKS).loads
    assert job.blocks == BLOCKS[::-1]
    warm.scheduler.on_outcomes(
        [LoadOutcome("r", 7, 8, 0.01, job.spans[1].variant, "store unavailable")]
    )
    assert warm.scheduler.loadable_tokens("r", 0) == 0
    warm.scheduler.on_allocated("r", BLOCKS, 0)
    warm.scheduler.on_finished("r", BLOCKS)
    assert warm.record("r") == told


@pytest.mark.parametrize("kept", [0, 64, 10_000])
def test_tokens_loaded_before_a_preemption_count_once(warm: SchedulerHarness, kept: int) -> None:
    warm.arrive("r")
    tokens = warm.scheduler.loadable_tokens("r", 0)
    assert tokens
    warm.scheduler.on_allocated("r", BLOCKS, tokens)
    warm.scheduler.step([], lambda _: BLOCKS)
    warm.scheduler.on_outcomes([LoadOutcome("r", tokens, 4096, 0.01, None, "")])
    warm.scheduler.step([("r", tokens, 2)], lambda _: BLOCKS)
    # Preempted before its first token. Some of it is still in vLLM's own prefix cache.
    local = min(kept, tokens)
    again = warm.scheduler.loadable_tokens("r", local)
    assert again == tokens - local
    warm.scheduler.on_allocated("r", BLOCKS, again)
    if again:
        warm.scheduler.step([], lambda _: BLOCKS)
        warm.scheduler.on_outcomes([LoadOutcome("r", again, 4096, 0.01, None, "")])
    warm.prefill("r", computed=tokens)
    warm.scheduler.on_finished("r", BLOCKS)
    told = warm.record("r")
    assert (told.local_tokens, told.loaded_tokens) == ((local, again) if again else (0, tokens))


def test_a_save_names_its_origin_and_the_deletes_it_knows_of(engine: SchedulerHarness) -> None:
    plan = plan_exact(PROMPT, SPACE, "tenant", "r", ["c/a", "c/a", "c/b"], 123)
    engine.scheduler.on_new_request(NewRequest("r", PROMPT.token_ids, {"ragcache": plan.encode()}))
    assert engine.scheduler.loadable_tokens("r", 0) == 0
    engine.scheduler.on_allocated("r", BLOCKS, 0)
    saves = engine.saves("r", pieces=2)
    chunks = tuple(segment.chunk for segment in plan.segments)
    keys = [job.span.variant for job in saves]
    influence = Influence(NO_READER.rights, NO_READER.key, num_head=1)
    assert [job.origin for job in saves] == [
        Origin((), None, "tenant", influence=influence),
        Origin(chunks[:1], keys[0], "tenant", "c/a", influence=influence),
        Origin(chunks[:2], keys[1], "tenant", "c/a", influence=influence),
        Origin(chunks[:3], keys[2], "tenant", "c/b", influence=influence),
    ]
    # So that the save does not undo a delete since the gateway chose the chunks.
    as_of = {shard: replace(one, planned_at_ms=123) for shard, one in AS_OF.items()}
    assert all(job.as_of == as_of for job in saves)


def test_the_last_chunk_of_a_long_prompt_costs_more_per_token(engine: SchedulerHarness) -> None:
    """Every save carries T(cached, computed) / computed of its request."""
    profile = PrefillProfile((0, 100), (1, 200), ((0.001, 0.2), (0.003, 0.6)), 2048)
    engine.scheduler.on_profile(profile, joins_passes=False)
    engine.arrive("first")
    engine.scheduler.loadable_tokens("first", 0)
    engine.scheduler.on_allocated("first", BLOCKS, 0)
    *before, last = engine.saves("first", pieces=2)
    whole_s = profile.predict(0, LENGTH) / LENGTH
    assert {job.origin.token_s for job in (*before, last)} == {whole_s}
    del engine.store.stored[last.span.variant]
    engine.arrive("again")
    cached = engine.loaded("again")
    assert cached == last.span.start
    engine.scheduler.step([], lambda _: BLOCKS)
    engine.scheduler.on_outcomes([LoadOutcome("again", cached, 4096, 0.01, None, "")])
    (again,) = engine.saves("again", computed=cached)
    assert again.origin.token_s == profile.predict(cached, LENGTH - cached) / (LENGTH - cached)
    assert again.origin.token_s > whole_s


def test_a_step_lists_computed_ranges_of_variants_to_save(warm: SchedulerHarness) -> None:
    warm.arrive("again")
    del warm.store.stored[list(warm.store.stored)[2]]
    warm.scheduler.loadable_tokens("again", 0)
    warm.scheduler.on_allocated("again", BLOCKS, 0)
    progress = [("again", 0, 30), ("stranger", 5, 70)]
    jobs = warm.scheduler.step(progress, lambda _: BLOCKS)
    assert (jobs.computed, jobs.num_tokens) == ((ComputedRange("again", 0, 30),), 100)
    # Tokens after the last chunk belong to no variant.
    jobs = warm.scheduler.step([("again", PROMPT.chunk_ends[-1], 5)], lambda _: BLOCKS)
    assert (jobs.computed, jobs.num_tokens) == ((), 5)


def test_a_variant_wanted_in_higher_precision_is_saved_again(warm: SchedulerHarness) -> None:
    warm.arrive("known")
    first, second, *_ = warm.store.stored
    lossy = Precision(Codec.INT8, Codec.INT4)
    for key, wanted in ((first, False), (second, True)):
        held = warm.store.stored[key]
        warm.store.stored[key] = replace(held, wants_higher_precision=wanted)
    held = warm.store.stored[second]
    warm.store.stored[second] = replace(held, info=replace(held.info, precision=lossy))
    warm.arrive("again")
    assert (
        warm.scheduler.loadable_tokens("again", 0) == PROMPT.head
    )  # a lossy variant never serves exact
    warm.scheduler.on_allocated("again", BLOCKS, PROMPT.head)
    assert warm.prefill("again", computed=0) == [second]


def test_the_record_says_why_the_first_variant_is_missing(warm: SchedulerHarness) -> None:
    missing, later = list(warm.store.stored)[1:3]
    del warm.store.stored[missing], warm.store.stored[later]
    warm.store.misses = {missing: Miss.OTHER_PRECISION, later: Miss.DELETED}
    warm.arrive("again")
    warm.scheduler.loadable_tokens("again", 0)
    warm.scheduler.on_allocated("again", BLOCKS, 0)
    warm.prefill("again")
    warm.scheduler.on_finished("again", BLOCKS)
    assert warm.record("again").miss == "other precision"


def test_a_store_outage_is_a_miss(engine: SchedulerHarness) -> None:
    engine.store.outage = Unavailable("cachestore", "gone")
    engine.arrive("r")
    assert engine.scheduler.loadable_tokens("r", 0) == 0
    engine.scheduler.on_allocated("r", BLOCKS, 0)
    engine.prefill("r")
    engine.scheduler.on_finished("r", BLOCKS)
    assert engine.record("r").miss == "store unavailable"


def test_all_lookups_of_a_step_share_one_wait_limit(
    engine: SchedulerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time spent on answers that arrive counts, too."""
    now, answer_s = 0.0, 2.0
    waits: list[float] = []

    class Slow(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            nonlocal now
            assert timeout is not None
            waits.append(timeout)
            now += min(timeout, answer_s)
            if timeout < answer_s:
                raise FutureTimeoutError
            return LookupResult((), ShardedLookup((), AS_OF))

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("ragcache_engine.scheduler.lookup_completion.time", clock)
    monkeypatch.setattr(LookupExecutor, "start_planned", lambda *_: Slow())
    for number in range(5):
        engine.arrive(str(number))
    for number in range(5):
        engine.scheduler.loadable_tokens(str(number), 0)
    assert waits == [5.0, 3.0, 1.0, 0.0, 0.0]
    engine.scheduler.step([], lambda _: BLOCKS)
    engine.arrive("next")
    engine.scheduler.loadable_tokens("next", 0)
    assert waits[-1] == 5.0


def test_values_are_held_for_queued_requests(warm: SchedulerHarness) -> None:
    keys = list(warm.store.stored)
    for key in keys[1:]:
        warm.store.stored[key] = replace(warm.store.stored[key], tier=Tier.DISK)
    warm.arrive("at once")
    assert warm.loaded("at once")
    warm.arrive("queues")

    def prefetched() -> list[list[VariantKey]]:
        warm.scheduler.step([], lambda _: BLOCKS)
        return warm.store.prefetched

    wait_until(prefetched)
    for _ in range(3):
        warm.scheduler.step([], lambda _: BLOCKS)
    warm.scheduler.close()
    assert warm.store.prefetched == [keys]


def test_a_hold_is_renewed_while_its_request_waits(warm: SchedulerHarness) -> None:
    clock = ManualClock()
    warm.scheduler._waiting = waiting = WaitingRequests(clock)
    warm.arrive("queues")
    keys = wait_until(waiting.take_due)
    assert waiting.take_due() == []
    clock.now += RENEW_S
    assert waiting.take_due() == keys
    assert warm.loaded("queues")
    clock.now += RENEW_S
    assert waiting.take_due() == []
    assert len(waiting) == 0


def test_finished_requests_and_failed_lookups_prefetch_nothing(warm: SchedulerHarness) -> None:
    for key in warm.store.stored:
        warm.store.stored[key] = replace(warm.store.stored[key], tier=Tier.DISK)
    warm.arrive("left")
    warm.scheduler.on_finished("left", BLOCKS)
    warm.store.outage = Unavailable("cachestore", "gone")
    warm.arrive("not told")
    assert warm.loaded("not told") == 0
    for _ in range(3):
        warm.scheduler.step([], lambda _: BLOCKS)
    assert len(warm.scheduler._waiting) == 0
    warm.scheduler.close()
    assert warm.store.prefetched == []
