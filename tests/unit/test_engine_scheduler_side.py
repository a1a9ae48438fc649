"""What the connector decides: which variants to load, which to save, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from ragcache_core.errors import Unavailable
from ragcache_core.keys import KVSpace, VariantKey
from ragcache_core.prompt import Prompt, assemble, plan_compute, plan_exact
from ragcache_core.storing import AsOf, Held, Variants, Want
from ragcache_core.variant import Codec, Miss, Origin, Precision, Provenance, Tier
from ragcache_engine.config import EngineConfig
from ragcache_engine.records import Record, RecordBook
from ragcache_engine.scheduler_side import SchedulerSide
from ragcache_engine.transfer import Computing, LoadOutcome, SaveJob
from ragcache_kv.store.sharded import ShardedAnswer, ShardedStore
from ragcache_wire.members import FixedMembers

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=4, dtype="bfloat16")
PROMPT = assemble(range(20), [range(100, 140), range(200, 250), range(300, 330)], range(9))
LENGTH = len(PROMPT.token_ids)
BLOCKS = tuple(range(10, 40))


AS_OF = {"shard:1": AsOf(bytes(16), 7)}


class FakeStore:
    """Answers lookups from a dict; an exception in ``outage`` is raised instead."""

    def __init__(self) -> None:
        self.stored: dict[VariantKey, Held] = {}
        self.misses: dict[VariantKey, Miss] = {}
        self.outage: Exception | None = None

    def lookup(
        self, wants: Sequence[Want], timeout_s: float = 1.0, *, exact: bool, domain: str
    ) -> ShardedAnswer:
        assert exact
        assert domain
        if self.outage is not None:
            raise self.outage
        return ShardedAnswer(tuple(self._answer(want) for want in wants), AS_OF)

    def _answer(self, want: Want) -> Variants:
        assert want.prefix is not None
        key = VariantKey(want.chunk, want.prefix)
        if key in self.stored:
            return Variants((self.stored[key],))
        return Variants(miss=self.misses.get(key, Miss.NEVER_STORED))

    def connect(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class Engine:
    """Plays vLLM's part: calls the scheduler side in vLLM's order."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.book = RecordBook()
        config = EngineConfig(FixedMembers(()), lookup_wait_s=5.0, min_load_tokens=16)
        self.side = SchedulerSide(config, SPACE, self.book, cast("ShardedStore", self.store))

    def arrive(self, request_id: str, prompt: Prompt = PROMPT, **kwargs: object) -> None:
        plan = plan_exact(prompt, SPACE, "public", request_id).to_json()
        self.side.on_new_request(request_id, prompt.token_ids, {"ragcache": {**plan, **kwargs}})

    def prefill(self, request_id: str, computed: int = 0, pieces: int = 1) -> list[VariantKey]:
        """Run the prefill in pieces; returns what is saved, in order."""
        return [job.span.variant for job in self.saves(request_id, computed, pieces)]

    def saves(self, request_id: str, computed: int = 0, pieces: int = 1) -> list[SaveJob]:
        """Run the prefill in pieces; returns the saves in order."""
        saved: list[SaveJob] = []
        size = -(-(LENGTH - computed) // pieces)
        while computed < LENGTH:
            scheduled = min(size, LENGTH - computed)
            jobs = self.side.step([(request_id, computed, scheduled)], lambda _: BLOCKS)
            saved += jobs.saves
            for job in jobs.saves:
                assert job.span.end <= computed + scheduled
                key = job.span.variant
                self.store.stored[key] = Held(key, job.info, Tier.MEMORY)
            computed += scheduled
        return saved

    def record(self, request_id: str) -> Record:
        record = self.book.get(request_id)
        assert record is not None
        return record


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def warm(engine: Engine) -> Engine:
    """An engine whose store holds the whole prompt."""
    engine.arrive("first")
    assert engine.side.loadable_tokens("first", 0) == 0
    engine.side.on_allocated("first", BLOCKS, 0)
    assert len(engine.prefill("first")) == 4
    engine.side.on_finished("first", BLOCKS)
    return engine


def test_a_request_without_a_plan_is_left_to_vllm(engine: Engine) -> None:
    engine.side.on_new_request("plain", PROMPT.token_ids, None)
    engine.side.on_new_request("other", PROMPT.token_ids, {"do_remote_prefill": True})
    assert engine.side.loadable_tokens("plain", 0) == 0
    assert engine.prefill("other") == []


@pytest.mark.parametrize("pieces", [1, 3, 7])
def test_each_segment_is_saved_once_in_the_step_that_completes_it(
    engine: Engine, pieces: int
) -> None:
    engine.arrive("r")
    assert engine.side.loadable_tokens("r", 0) == 0
    engine.side.on_allocated("r", BLOCKS, 0)
    saved = engine.prefill("r", pieces=pieces)
    assert len(saved) == len(set(saved)) == 4
    assert all(held.info.provenance.exact for held in engine.store.stored.values())


def test_the_whole_chain_is_loaded_but_never_the_question(warm: Engine) -> None:
    warm.arrive("again")
    chunks_end = PROMPT.chunk_ends[-1]
    assert warm.side.loadable_tokens("again", 0) == chunks_end
    warm.side.on_allocated("again", BLOCKS, chunks_end)
    (job,) = warm.side.step([], lambda _: BLOCKS).loads
    assert (job.first, job.end, len(job.spans)) == (0, chunks_end, 4)
    outcome = LoadOutcome("again", chunks_end, 4096, 0.01, None, "")
    warm.side.on_outcomes([outcome])
    warm.side.on_allocated("again", BLOCKS, 0)
    assert warm.prefill("again", computed=chunks_end) == []
    warm.side.on_finished("again", BLOCKS)
    record = warm.record("again")
    assert (record.loaded_tokens, record.loaded_bytes, record.miss) == (chunks_end, 4096, "")


def test_only_what_the_engine_does_not_hold_itself_is_loaded(warm: Engine) -> None:
    warm.arrive("again")
    assert warm.side.loadable_tokens("again", 32) == PROMPT.chunk_ends[-1] - 32
    warm.side.on_allocated("again", BLOCKS, PROMPT.chunk_ends[-1] - 32)
    (job,) = warm.side.step([], lambda _: BLOCKS).loads
    # the head ends at 20, so of the first chunk only the tokens from 32 on are wanted
    assert (job.first, job.spans[0].start) == (32, 20)


def test_a_few_tokens_are_computed_rather_than_loaded(warm: Engine) -> None:
    warm.arrive("again")
    assert warm.side.loadable_tokens("again", PROMPT.chunk_ends[-1] - 4) == 0


def test_the_last_token_of_a_prompt_is_always_computed(warm: Engine) -> None:
    whole = Prompt(PROMPT.token_ids[: PROMPT.chunk_ends[-1]], PROMPT.head, PROMPT.chunk_ends)
    warm.arrive("no-question", whole)
    assert warm.side.loadable_tokens("no-question", 0) == len(whole.token_ids) - 1


def test_the_chain_ends_at_the_first_variant_that_is_missing(warm: Engine) -> None:
    warm.arrive("probe")
    keys = list(warm.store.stored)
    del warm.store.stored[keys[2]]
    warm.arrive("again")
    assert warm.side.loadable_tokens("again", 0) == PROMPT.chunk_ends[0]
    warm.side.on_allocated("again", BLOCKS, PROMPT.chunk_ends[0])
    assert warm.prefill("again", computed=PROMPT.chunk_ends[0]) == [keys[2]]


def test_a_tainted_variant_never_serves_exact(warm: Engine) -> None:
    keys = list(warm.store.stored)
    held = warm.store.stored[keys[1]]
    tainted = replace(held.info, provenance=Provenance(exact=False))
    warm.store.stored[keys[1]] = replace(held, info=tainted)
    warm.arrive("again")
    assert warm.side.loadable_tokens("again", 0) == PROMPT.head
    # and it is replaced by the exact one that this request computes
    warm.side.on_allocated("again", BLOCKS, PROMPT.head)
    assert keys[1] in warm.prefill("again", computed=PROMPT.head)


def test_a_plan_for_other_tokens_is_not_served(warm: Engine) -> None:
    other = assemble(range(20), [range(100, 140), range(201, 251), range(300, 330)], range(9))
    plan = plan_exact(PROMPT, SPACE, "public", "forged").to_json()
    warm.side.on_new_request("forged", other.token_ids, {"ragcache": plan})
    # head and first chunk are the same; from the second on the tokens do not hash to the plan
    assert warm.side.loadable_tokens("forged", 0) == PROMPT.chunk_ends[0]


def test_another_domain_does_not_see_the_variants(warm: Engine) -> None:
    plan = plan_exact(PROMPT, SPACE, "tenant", "r").to_json()
    warm.side.on_new_request("r", PROMPT.token_ids, {"ragcache": plan})
    assert warm.side.loadable_tokens("r", 0) == 0


def test_reuse_off_neither_loads_nor_saves(warm: Engine) -> None:
    plan = plan_compute(PROMPT, SPACE, "public", "off").to_json()
    warm.store.stored.clear()
    warm.side.on_new_request("off", PROMPT.token_ids, {"ragcache": plan})
    assert warm.side.loadable_tokens("off", 0) == 0
    warm.side.on_allocated("off", BLOCKS, 0)
    assert warm.prefill("off") == []


def test_after_a_failed_load_the_request_is_computed_and_saved_anew(warm: Engine) -> None:
    warm.arrive("again")
    tokens = warm.side.loadable_tokens("again", 0)
    assert tokens
    warm.side.on_allocated("again", BLOCKS, tokens)
    (job,) = warm.side.step([], lambda _: BLOCKS).loads
    missing = job.spans[2].variant
    del warm.store.stored[missing]
    outcome = LoadOutcome("again", job.spans[1].end, 100, 0.01, missing, "corrupt")
    warm.side.on_outcomes([outcome])
    assert warm.side.loadable_tokens("again", 32) == 0
    warm.side.on_allocated("again", BLOCKS, 0)
    assert missing in warm.prefill("again", computed=32)
    warm.side.on_finished("again", BLOCKS)
    assert warm.record("again").miss == "corrupt"


def test_a_preempted_request_is_loaded_again_and_its_record_stays(warm: Engine) -> None:
    warm.arrive("r")
    tokens = warm.side.loadable_tokens("r", 0)
    assert tokens
    warm.side.on_allocated("r", BLOCKS, tokens)
    warm.side.step([], lambda _: BLOCKS)
    warm.side.on_outcomes([LoadOutcome("r", tokens, 4096, 0.01, None, "")])
    warm.side.on_allocated("r", BLOCKS, 0)
    assert warm.prefill("r", computed=tokens) == []
    warm.side.step([("r", LENGTH, 1)], lambda _: BLOCKS)
    told = replace(warm.record("r"))
    # preempted while it decodes: vLLM asks from the start, now with the tokens of the answer
    assert warm.side.loadable_tokens("r", 0) == tokens
    warm.side.on_allocated("r", BLOCKS[::-1], tokens)
    (job,) = warm.side.step([], lambda _: BLOCKS).loads
    assert job.blocks == BLOCKS[::-1]
    warm.side.on_outcomes([LoadOutcome("r", 7, 8, 0.01, job.spans[1].variant, "store unavailable")])
    assert warm.side.loadable_tokens("r", 0) == 0
    warm.side.on_allocated("r", BLOCKS, 0)
    warm.side.on_finished("r", BLOCKS)
    assert warm.record("r") == told


def test_what_is_saved_says_where_it_comes_from(engine: Engine) -> None:
    plan = plan_exact(PROMPT, SPACE, "tenant", "r", ["c/a", "c/a", "c/b"], 123)
    engine.side.on_new_request("r", PROMPT.token_ids, {"ragcache": plan.to_json()})
    assert engine.side.loadable_tokens("r", 0) == 0
    engine.side.on_allocated("r", BLOCKS, 0)
    saves = engine.saves("r", pieces=2)
    chunks = tuple(segment.chunk for segment in plan.segments)
    keys = [job.span.variant for job in saves]
    assert [job.origin for job in saves] == [
        Origin((), None, "tenant"),
        Origin(chunks[:1], keys[0], "tenant", "c/a"),
        Origin(chunks[:2], keys[1], "tenant", "c/a"),
        Origin(chunks[:3], keys[2], "tenant", "c/b"),
    ]
    # So that a delete since the chunks were chosen is not undone.
    as_of = {shard: replace(one, planned_at_ms=123) for shard, one in AS_OF.items()}
    assert all(job.as_of == as_of for job in saves)


def test_a_step_says_what_it_computes_for_whoever_measures_it(warm: Engine) -> None:
    warm.arrive("again")
    del warm.store.stored[list(warm.store.stored)[2]]
    warm.side.loadable_tokens("again", 0)
    warm.side.on_allocated("again", BLOCKS, 0)
    progress = [("again", 0, 30), ("stranger", 5, 70)]
    jobs = warm.side.step(progress, lambda _: BLOCKS)
    assert (jobs.computing, jobs.num_tokens) == ((Computing("again", 0, 30),), 100)
    # Past the last chunk nothing is measured: no variant is made of it.
    jobs = warm.side.step([("again", PROMPT.chunk_ends[-1], 5)], lambda _: BLOCKS)
    assert (jobs.computing, jobs.num_tokens) == ((), 5)


def test_what_is_wanted_better_is_saved_again(warm: Engine) -> None:
    warm.arrive("known")
    first, second, *_ = warm.store.stored
    lossy = Precision(Codec.INT8, Codec.INT4)
    for key, wanted in ((first, False), (second, True)):
        held = warm.store.stored[key]
        warm.store.stored[key] = replace(held, wanted_better=wanted)
    held = warm.store.stored[second]
    warm.store.stored[second] = replace(held, info=replace(held.info, precision=lossy))
    warm.arrive("again")
    assert warm.side.loadable_tokens("again", 0) == PROMPT.head  # lossy never serves exact
    warm.side.on_allocated("again", BLOCKS, PROMPT.head)
    assert warm.prefill("again", computed=0) == [second]


def test_the_record_says_why_the_first_missing_variant_was_not_there(warm: Engine) -> None:
    missing, later = list(warm.store.stored)[1:3]
    del warm.store.stored[missing], warm.store.stored[later]
    warm.store.misses = {missing: Miss.OTHER_PRECISION, later: Miss.DELETED}
    warm.arrive("again")
    warm.side.loadable_tokens("again", 0)
    warm.side.on_allocated("again", BLOCKS, 0)
    warm.prefill("again")
    warm.side.on_finished("again", BLOCKS)
    assert warm.record("again").miss == "other precision"


def test_an_outage_of_the_store_is_a_miss(engine: Engine) -> None:
    engine.store.outage = Unavailable("cachestore", "gone")
    engine.arrive("r")
    assert engine.side.loadable_tokens("r", 0) == 0
    engine.side.on_allocated("r", BLOCKS, 0)
    engine.prefill("r")
    engine.side.on_finished("r", BLOCKS)
    assert engine.record("r").miss == "store unavailable"


def test_a_malformed_plan_is_dropped(engine: Engine) -> None:
    engine.arrive("r", segments="all of them")
    assert engine.side.loadable_tokens("r", 0) == 0
    assert engine.prefill("r") == []
