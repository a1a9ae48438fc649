"""What the connector decides: which variants to load, which to save, and when."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ragcache_core.cost.load_or_compute import RETRY_EVERY, ReuseCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import Unavailable
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import Codec, Miss, Origin, Precision, Provenance, Tier
from ragcache_core.plan.prefix_pieces import PIECE_TOKENS
from ragcache_core.plan.prompt import Prompt, assemble, plan_compute, plan_exact
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import checked_segments
from ragcache_core.plan.signature import sign
from ragcache_core.store_api import AsOf, ChunkVariants, LookupKey, StoredVariant
from ragcache_engine.protocol.messages import ComputedRange, LoadOutcome, SaveJob, StepReport
from ragcache_engine.protocol.roles import EngineRole
from ragcache_engine.scheduler.lookup import LookupExecutor, LookupResult
from ragcache_engine.scheduler.refused_plans import RefusalReason
from ragcache_engine.scheduler.scheduler import ConnectorScheduler
from ragcache_engine.telemetry.request_records import RequestRecord, RequestRecords
from ragcache_kv.store_client.sharded import ShardedLookup, ShardedStore
from ragcache_kv.values.layout import value_bytes
from ragcache_wire.settings import EngineSettings
from ragcache_wire.watched.members import FixedMembers
from ragcache_wire.watched.signing_keys import SigningKeys
from ragcache_wire.watched.watched_file import CHECK_EVERY_S

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=4, dtype="bfloat16")
PROMPT = assemble(range(20), [range(100, 140), range(200, 250), range(300, 330)], range(9))
LENGTH = len(PROMPT.token_ids)
BLOCKS = tuple(range(10, 40))
PLAIN = [n * 7919 % 1000 for n in range(3 * PIECE_TOKENS + 30)]


AS_OF = {"shard:1": AsOf(bytes(16), 7)}


class FakeStore:
    """Answers lookups from a dict; an exception in ``outage`` is raised instead."""

    def __init__(self) -> None:
        self.stored: dict[VariantKey, StoredVariant] = {}
        self.misses: dict[VariantKey, Miss] = {}
        self.outage: Exception | None = None
        self.prefetched: list[list[VariantKey]] = []

    def lookup(
        self, wants: Sequence[LookupKey], timeout_s: float = 1.0, *, exact: bool, domain: str
    ) -> ShardedLookup:
        assert exact
        assert domain
        if self.outage is not None:
            raise self.outage
        return ShardedLookup(tuple(self._answer(want) for want in wants), AS_OF)

    def _answer(self, want: LookupKey) -> ChunkVariants:
        assert want.prefix is not None
        key = VariantKey(want.chunk, want.prefix)
        if key in self.stored:
            return ChunkVariants((self.stored[key],))
        return ChunkVariants(miss=self.misses.get(key, Miss.NEVER_STORED))

    def prefetch(self, keys: Sequence[VariantKey], timeout_s: float) -> int:
        self.prefetched.append(list(keys))
        return len(keys)

    def connect(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class Engine:
    """Plays vLLM's part: calls the scheduler side in vLLM's order."""

    def __init__(
        self,
        plan_keys: SigningKeys | None = None,
        *,
        plain_prefixes: bool = True,
        role: EngineRole = EngineRole.BOTH,
        store: FakeStore | None = None,
        handoff_wait_s: float = 60.0,
    ) -> None:
        self.store = store or FakeStore()
        self.book = RequestRecords()
        config = EngineSettings(
            cachestore=FixedMembers(()),
            signing_key_file=plan_keys,
            lookup_wait_s=5.0,
            min_load_tokens=16,
            plain_prefixes=plain_prefixes,
            handoff_wait_s=handoff_wait_s,
        )
        self.costs = ReuseCosts()
        store = cast("ShardedStore", self.store)
        self.side = ConnectorScheduler(config, SPACE, self.book, store, self.costs, role=role)

    def arrive(self, request_id: str, prompt: Prompt = PROMPT, **kwargs: object) -> None:
        plan = plan_exact(prompt, SPACE, "public", request_id).to_json()
        self.side.on_new_request(request_id, prompt.token_ids, {"ragcache": {**plan, **kwargs}})

    def loaded(self, request_id: str) -> int:
        """Tokens that are loaded, however often vLLM has to ask."""
        deadline = time.monotonic() + 20
        while (tokens := self.side.loadable_tokens(request_id, 0)) is None:
            assert time.monotonic() < deadline, "never known"
            time.sleep(0.001)
        self.side.on_allocated(request_id, BLOCKS, tokens)
        return tokens

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
                self.store.stored[key] = StoredVariant(key, job.info, Tier.MEMORY)
            computed += scheduled
        return saved

    def plain(
        self, request_id: str, token_ids: Sequence[int] = PLAIN, **given: Any
    ) -> tuple[int, list[VariantKey]]:
        """A request without a plan, served from the store and then computed in two passes.

        Returns how many tokens are loaded, and what is saved.
        """
        self.side.on_new_request(request_id, token_ids, None, **given)
        loaded = self.side.loadable_tokens(request_id, 0)
        assert loaded is not None
        self.side.on_allocated(request_id, BLOCKS, loaded)
        saved = []
        for end in (len(token_ids) // 2, len(token_ids)):
            jobs = self.side.step([(request_id, loaded, max(1, end - loaded))], lambda _: BLOCKS)
            for job in jobs.saves:
                key = job.span.variant
                saved.append(key)
                self.store.stored[key] = StoredVariant(key, job.info, Tier.MEMORY)
        self.side.on_finished(request_id, BLOCKS)
        return loaded, saved

    def record(self, request_id: str) -> RequestRecord:
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


def test_a_short_prompt_without_a_plan_is_left_to_vllm(engine: Engine) -> None:
    engine.store.outage = AssertionError("asked")
    assert len(PROMPT.token_ids) < PIECE_TOKENS
    engine.side.on_new_request("plain", PROMPT.token_ids, None)
    engine.side.on_new_request("other", PROMPT.token_ids, {"do_remote_prefill": True})
    assert engine.side.loadable_tokens("plain", 0) == 0
    assert engine.prefill("other") == []


def test_whole_pieces_of_a_prompt_without_a_plan_are_saved_once_and_loaded(engine: Engine) -> None:
    loaded, saved = engine.plain("first")
    assert (loaded, len(saved)) == (0, 3)
    assert all(held.info.provenance.exact for held in engine.store.stored.values())
    assert engine.plain("again") == (3 * PIECE_TOKENS, [])
    # One that goes on elsewhere has the whole pieces of what they share.
    other = [*PLAIN[: 2 * PIECE_TOKENS + 40], *range(PIECE_TOKENS)]
    loaded, saved = engine.plain("other", other)
    assert (loaded, len(saved)) == (2 * PIECE_TOKENS, 1)


def test_the_last_token_of_whole_pieces_is_computed(engine: Engine) -> None:
    engine.plain("first", PLAIN[: 2 * PIECE_TOKENS])
    assert engine.plain("again", PLAIN[: 2 * PIECE_TOKENS])[0] == 2 * PIECE_TOKENS - 1


def test_without_a_plan_prefixes_are_shared_with_the_same_salt_alone(engine: Engine) -> None:
    engine.plain("first", cache_salt="mine")
    assert engine.plain("mine", cache_salt="mine")[0] == 3 * PIECE_TOKENS
    assert engine.plain("no salt")[0] == 0
    assert engine.plain("other salt", cache_salt="other")[0] == 0


def test_without_a_plan_there_is_no_record(engine: Engine) -> None:
    engine.plain("first")
    assert engine.book.get("") is None
    assert engine.book.get("first") is None


def test_what_vllm_would_not_cache_is_left_to_it(engine: Engine) -> None:
    engine.plain("first")
    assert engine.plain("again", cacheable=False) == (0, [])


def test_prefixes_without_a_plan_can_be_switched_off() -> None:
    engine = Engine(plain_prefixes=False)
    assert engine.plain("first") == (0, [])
    assert engine.store.stored == {}


def test_an_outage_of_the_store_leaves_a_request_without_a_plan_to_vllm(engine: Engine) -> None:
    engine.store.outage = Unavailable("cachestore", "gone")
    assert engine.plain("first") == (0, [])


def test_a_prompt_is_handed_over_to_its_last_token_but_one() -> None:
    computes = Engine(role=EngineRole.PREFILL)
    computes.arrive("r", handoff=True)
    assert computes.loaded("r") == 0
    saves = computes.saves("r", pieces=3)
    assert [job.span.end for job in saves] == [*(PROMPT.head, *PROMPT.chunk_ends), LENGTH - 1]
    computes.side.on_finished("r", BLOCKS)
    goes_on = Engine(role=EngineRole.DECODE, store=computes.store)
    goes_on.arrive("r", handoff=True)
    assert goes_on.loaded("r") == LENGTH - 1
    assert goes_on.prefill("r", computed=LENGTH - 1) == []
    goes_on.side.on_finished("r", BLOCKS)
    assert goes_on.record("r").miss == ""


def test_a_prompt_is_handed_over_even_where_the_store_did_not_answer_in_time() -> None:
    computes = Engine(role=EngineRole.PREFILL)
    computes.store.outage = Unavailable("cachestore", "busy")
    computes.arrive("r", handoff=True)
    assert computes.loaded("r") == 0
    ends = [job.span.end for job in computes.saves("r", pieces=3)]
    assert ends == [*(PROMPT.head, *PROMPT.chunk_ends), LENGTH - 1]


def test_an_engine_that_decodes_waits_for_what_is_being_computed() -> None:
    goes_on = Engine(role=EngineRole.DECODE)
    goes_on.arrive("r", handoff=True)
    for _ in range(50):
        assert goes_on.side.loadable_tokens("r", 0) is None
        time.sleep(0.001)
    computes = Engine(role=EngineRole.PREFILL, store=goes_on.store)
    computes.arrive("r", handoff=True)
    assert computes.loaded("r") == 0
    computes.prefill("r")
    assert goes_on.loaded("r") == LENGTH - 1


def test_an_engine_that_has_waited_long_enough_computes_and_saves_the_chunks() -> None:
    goes_on = Engine(role=EngineRole.DECODE, handoff_wait_s=0.03)
    goes_on.arrive("r", handoff=True)
    assert goes_on.loaded("r") == 0
    ends = [job.span.end for job in goes_on.saves("r", pieces=2)]
    assert ends == [PROMPT.head, *PROMPT.chunk_ends]
    goes_on.side.on_finished("r", BLOCKS)
    assert goes_on.record("r").miss == "handoff timed out"


def test_nobody_waits_for_a_store_that_is_away_or_a_part_of_it_that_is_lost() -> None:
    goes_on = Engine(role=EngineRole.DECODE)
    goes_on.store.outage = Unavailable("cachestore", "gone")
    goes_on.arrive("away", handoff=True)
    assert goes_on.loaded("away") == 0
    goes_on.store.outage = None
    first = checked_segments(plan_exact(PROMPT, SPACE, "public", "r"), PROMPT.token_ids, SPACE)[0]
    goes_on.store.misses = {first.variant: Miss.LOST}
    goes_on.arrive("lost", handoff=True)
    assert goes_on.loaded("lost") == 0


def test_nobody_waits_for_the_few_tokens_that_an_engine_does_not_hold_itself() -> None:
    goes_on = Engine(role=EngineRole.DECODE)
    goes_on.arrive("r", handoff=True)
    assert goes_on.side.loadable_tokens("r", LENGTH - 10) == 0


@pytest.mark.parametrize("role", [EngineRole.PREFILL, EngineRole.DECODE])
def test_whatever_is_not_handed_over_is_served_as_by_any_engine(role: EngineRole) -> None:
    engine = Engine(role=role)
    engine.arrive("r")
    assert engine.loaded("r") == 0
    assert len(engine.prefill("r")) == 4
    engine.side.on_finished("r", BLOCKS)
    assert engine.plain("plain")[0] == 0


@pytest.mark.parametrize("role", EngineRole)
def test_a_plan_that_does_not_hold_for_its_prompt_is_not_handed_over(role: EngineRole) -> None:
    engine = Engine(role=role)
    computed = plan_compute(PROMPT, SPACE, "public", "computed")
    params = {"ragcache": replace(computed, handoff=True).to_json()}
    engine.side.on_new_request("computed", PROMPT.token_ids, params)
    assert engine.loaded("computed") == 0
    assert engine.prefill("computed") == []
    assert engine.store.stored == {}


def test_an_engine_that_does_both_hands_nothing_over(engine: Engine) -> None:
    engine.arrive("r", handoff=True)
    assert engine.loaded("r") == 0
    assert len(engine.prefill("r")) == 4


def test_a_dropped_plan_does_not_make_a_request_one_without(engine: Engine) -> None:
    engine.side.on_new_request("r", PLAIN, {"ragcache": {"v": 0}})
    assert engine.side.loadable_tokens("r", 0) == 0
    assert engine.side.step([("r", 0, len(PLAIN))], lambda _: BLOCKS).saves == ()


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


@pytest.mark.parametrize("kept", [0, 64, 10_000])
def test_what_was_loaded_before_a_preemption_counts_once(warm: Engine, kept: int) -> None:
    warm.arrive("r")
    tokens = warm.side.loadable_tokens("r", 0)
    assert tokens
    warm.side.on_allocated("r", BLOCKS, tokens)
    warm.side.step([], lambda _: BLOCKS)
    warm.side.on_outcomes([LoadOutcome("r", tokens, 4096, 0.01, None, "")])
    warm.side.step([("r", tokens, 2)], lambda _: BLOCKS)
    # preempted before its first token; so much is still in vLLM's own prefix cache
    local = min(kept, tokens)
    again = warm.side.loadable_tokens("r", local)
    assert again == tokens - local
    warm.side.on_allocated("r", BLOCKS, again)
    if again:
        warm.side.step([], lambda _: BLOCKS)
        warm.side.on_outcomes([LoadOutcome("r", again, 4096, 0.01, None, "")])
    warm.prefill("r", computed=tokens)
    warm.side.on_finished("r", BLOCKS)
    told = warm.record("r")
    assert (told.local_tokens, told.loaded_tokens) == ((local, again) if again else (0, tokens))


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
    assert (jobs.computed, jobs.num_tokens) == ((ComputedRange("again", 0, 30),), 100)
    # Past the last chunk nothing is measured: no variant is made of it.
    jobs = warm.side.step([("again", PROMPT.chunk_ends[-1], 5)], lambda _: BLOCKS)
    assert (jobs.computed, jobs.num_tokens) == ((), 5)


def test_what_is_wanted_better_is_saved_again(warm: Engine) -> None:
    warm.arrive("known")
    first, second, *_ = warm.store.stored
    lossy = Precision(Codec.INT8, Codec.INT4)
    for key, wanted in ((first, False), (second, True)):
        held = warm.store.stored[key]
        warm.store.stored[key] = replace(held, wants_higher_precision=wanted)
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


PROFILE = PrefillProfile((0,), (1, 1000), ((1e-3, 1.0),), 2048)
"""A millisecond a token."""


def teach(engine: Engine, tier: Tier, token_s: float) -> None:
    """Let the engine learn what loading a token from a tier takes."""
    engine.side.on_profile(PROFILE)
    for tokens in (100, 200, 300, 400, 500):
        engine.costs.observe_load({tier: value_bytes(SPACE, tokens)}, token_s * tokens)


def test_what_computing_does_faster_is_not_loaded(warm: Engine) -> None:
    teach(warm, Tier.MEMORY, 1e-5)
    warm.arrive("quick")
    assert warm.side.loadable_tokens("quick", 0) == PROMPT.chunk_ends[-1]
    for _ in range(50):
        teach(warm, Tier.MEMORY, 0.1)
    warm.arrive("slow")
    for _ in range(RETRY_EVERY + 1):  # vLLM may ask more than once, which is one decision
        assert warm.side.loadable_tokens("slow", 0) == 0
    assert warm.prefill("slow") == []
    warm.side.on_finished("slow", ())
    assert warm.record("slow").reported_miss == "computing is faster"


def test_a_record_tells_of_the_last_decision_before_the_first_token(warm: Engine) -> None:
    """vLLM asks again with more at hand, and once more when it preempts an answer."""
    teach(warm, Tier.MEMORY, 1e-5)
    teach(warm, Tier.DISK, 0.1)
    at_hand = PROMPT.chunk_ends[0]
    key = next(iter(warm.store.stored))
    warm.store.stored[key] = replace(warm.store.stored[key], tier=Tier.DISK)
    warm.arrive("r")
    assert warm.side.loadable_tokens("r", 0) == 0
    assert warm.side.loadable_tokens("r", at_hand) == PROMPT.chunk_ends[-1] - at_hand
    warm.side.on_allocated("r", BLOCKS, PROMPT.chunk_ends[-1] - at_hand)
    tokens = PROMPT.chunk_ends[-1] - at_hand
    warm.side.on_outcomes([LoadOutcome("r", tokens, 9, 0.01, None, "")])
    warm.prefill("r", PROMPT.chunk_ends[-1])
    warm.side.step([("r", LENGTH, 1)], lambda _: BLOCKS)
    assert warm.record("r").reported_miss == ""
    warm.side.loadable_tokens("r", 0)
    assert warm.record("r").reported_miss == ""


def test_what_a_step_waits_for_lookups_is_bounded_for_all_of_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that come while they are waited for take of it, too."""
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
        engine.side.loadable_tokens(str(number), 0)
    assert waits == [5.0, 3.0, 1.0, 0.0, 0.0]
    engine.side.step([], lambda _: BLOCKS)
    engine.arrive("next")
    engine.side.loadable_tokens("next", 0)
    assert waits[-1] == 5.0


def test_loading_ends_before_a_disk_that_is_slower_than_computing(warm: Engine) -> None:
    last = list(warm.store.stored)[-1]
    warm.store.stored[last] = replace(warm.store.stored[last], tier=Tier.DISK)
    teach(warm, Tier.MEMORY, 1e-5)
    teach(warm, Tier.DISK, 0.1)
    warm.arrive("r")
    assert warm.side.loadable_tokens("r", 0) == PROMPT.chunk_ends[-2]


def test_a_load_teaches_what_its_tier_takes(warm: Engine) -> None:
    loaded = sum(held.info.num_bytes for held in warm.store.stored.values())
    for number in range(5):
        load(warm, f"load-{number}", 0.5, store=loaded)
    latency_s, bytes_per_s = warm.costs.tier_bandwidths()[Tier.MEMORY]
    assert latency_s + loaded / bytes_per_s == pytest.approx(0.5)
    assert Tier.DISK not in warm.costs.tier_bandwidths()


def load(engine: Engine, request: str, seconds: float, **bytes_by_tier: int) -> None:
    engine.arrive(request)
    tokens = engine.side.loadable_tokens(request, 0)
    assert tokens
    engine.side.on_allocated(request, BLOCKS, tokens)
    engine.side.on_outcomes(
        [LoadOutcome(request, tokens, 9, seconds, None, "", bytes_by_tier=bytes_by_tier)]
    )


def test_what_lies_on_disk_is_brought_up_for_those_who_queue(warm: Engine) -> None:
    keys = list(warm.store.stored)
    for key in keys[1:]:
        warm.store.stored[key] = replace(warm.store.stored[key], tier=Tier.DISK)
    warm.arrive("at once")
    assert warm.loaded("at once")
    warm.arrive("queues")
    deadline = time.monotonic() + 20
    while not warm.store.prefetched:
        assert time.monotonic() < deadline
        warm.side.step([], lambda _: BLOCKS)
        time.sleep(0.001)
    for _ in range(3):
        warm.side.step([], lambda _: BLOCKS)
    warm.side.close()
    assert warm.store.prefetched == [keys[1:]]


def test_nothing_is_brought_up_for_who_has_left_or_could_not_be_told(warm: Engine) -> None:
    for key in warm.store.stored:
        warm.store.stored[key] = replace(warm.store.stored[key], tier=Tier.DISK)
    warm.arrive("left")
    warm.side.on_finished("left", BLOCKS)
    warm.store.outage = Unavailable("cachestore", "gone")
    warm.arrive("not told")
    assert warm.loaded("not told") == 0
    for _ in range(3):
        warm.side.step([], lambda _: BLOCKS)
    assert not warm.side._arrived
    warm.side.close()
    assert warm.store.prefetched == []


def test_what_the_worker_keeps_itself_is_no_matter_of_the_stores(warm: Engine) -> None:
    """Behind a store that is slower than computing, what is here is loaded, and teaches of here."""
    loaded = sum(held.info.num_bytes for held in warm.store.stored.values())
    teach(warm, Tier.MEMORY, 0.1)
    before = warm.costs.tier_bandwidths()
    warm.side.on_report(StepReport(tier_changes=dict.fromkeys(warm.store.stored, "host")))
    for number in range(20):
        load(warm, f"here-{number}", 1e-3, host=loaded)
    assert warm.costs.tier_bandwidths()["host"][1] == pytest.approx(loaded / 1e-3)
    assert warm.costs.tier_bandwidths()[Tier.MEMORY] == before[Tier.MEMORY]
    warm.side.on_report(StepReport(tier_changes=dict.fromkeys(warm.store.stored)))
    warm.arrive("gone")
    assert warm.side.loadable_tokens("gone", 0) == 0


def test_a_load_that_is_partly_the_stores_teaches_of_both(warm: Engine) -> None:
    first, *others = warm.store.stored
    warm.side.on_report(StepReport(tier_changes={first: "host"}))
    here = value_bytes(SPACE, warm.store.stored[first].info.num_tokens)
    there = sum(warm.store.stored[key].info.num_bytes for key in others)
    for number in range(5):
        load(warm, f"both-{number}", 0.5, host=here, store=there)
    costs = warm.costs.tier_bandwidths()
    assert costs.keys() == {"host", Tier.MEMORY}
    assert here / costs["host"][1] + there / costs[Tier.MEMORY][1] == pytest.approx(0.5)


def test_passes_teach_what_computing_takes(engine: Engine) -> None:
    """Two requests of one pass: what they look at counts for each token that looks."""
    engine.side.on_profile(PROFILE)
    engine.arrive("a")
    jobs = engine.side.step([("a", 0, 100), ("unplanned", 30, 60)], lambda _: BLOCKS)
    assert jobs.work == pytest.approx(0.16)
    assert jobs.prompt_tokens == jobs.num_tokens == 160
    decoding = engine.side.step([("b", 30, 1), ("c", 50, 1), ("d", 0, 40)], lambda _: BLOCKS)
    assert (decoding.prompt_tokens, decoding.num_tokens) == (40, 42)
    for _ in range(300):
        engine.side.on_passes([(jobs.work, 3 * jobs.work)])
    assert engine.costs.predict_compute_s(0, 500) == pytest.approx(1.5, rel=0.05)


KEY, OTHER_KEY = bytes([1] * 32), bytes([2] * 32)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"{KEY.hex()}\n")
    return path


@pytest.fixture
def strict(warm: Engine, key_file: Path) -> Engine:
    """An engine that asks for seals, with a store that holds the whole prompt."""
    engine = Engine(SigningKeys(key_file))
    engine.store.stored = dict(warm.store.stored)
    return engine


def params(plan: ReusePlan, prompt: Prompt = PROMPT, key: bytes = KEY) -> dict[str, Any]:
    said = plan.to_json()
    return {"ragcache": said, "ragcache_signature": sign(said, prompt.token_ids, key)}


def test_a_sealed_plan_is_acted_on(strict: Engine) -> None:
    plan = plan_exact(PROMPT, SPACE, "public", "r")
    strict.side.on_new_request("r", PROMPT.token_ids, params(plan))
    assert strict.side.loadable_tokens("r", 0) == PROMPT.chunk_ends[-1]
    assert not strict.side.take_refused()


OTHER_PROMPT = assemble(range(20), [range(500, 540)], range(9))
OURS, THEIRS = (plan_exact(PROMPT, SPACE, domain, "r") for domain in ("public", "tenant"))
FORGED: dict[str, tuple[dict[str, Any], RefusalReason]] = {
    "no seal": ({"ragcache": OURS.to_json()}, RefusalReason.UNSIGNED),
    "null": ({"ragcache": OURS.to_json(), "ragcache_signature": None}, RefusalReason.UNSIGNED),
    "another key": (params(OURS, key=OTHER_KEY), RefusalReason.FORGED),
    "another prompt": (params(OURS, OTHER_PROMPT), RefusalReason.FORGED),
    "another domain": (params(OURS) | {"ragcache": THEIRS.to_json()}, RefusalReason.FORGED),
    "no text": ({"ragcache": OURS.to_json(), "ragcache_signature": [1]}, RefusalReason.FORGED),
    "no plan": ({"ragcache": 7, "ragcache_signature": "0" * 64}, RefusalReason.FORGED),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_plan_that_is_not_the_gateways_loads_and_saves_nothing(strict: Engine, case: str) -> None:
    sent, why = FORGED[case]
    strict.side.on_new_request("r", PROMPT.token_ids, sent)
    assert strict.side.loadable_tokens("r", 0) == 0
    strict.store.stored.clear()
    strict.side.on_allocated("r", BLOCKS, 0)
    assert strict.prefill("r") == []
    assert strict.side.on_finished("r", BLOCKS) is False
    assert strict.book.get("r") is None
    assert strict.side.take_refused() == {why.value: 1}
    assert not strict.side.take_refused()


def test_without_keys_any_plan_is_acted_on_and_that_is_said_once(
    warm: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.ragcache"):
        Engine()
        assert [m for m in caplog.messages if "RAGCACHE_SIGNING_KEY_FILE is not set" in m]
        caplog.clear()
        for name in ("a", "b"):
            warm.arrive(name)
            assert warm.side.loadable_tokens(name, 0) == PROMPT.chunk_ends[-1]
    assert caplog.messages == []


def test_keys_change_while_the_engine_runs(strict: Engine, key_file: Path) -> None:
    now_s = 0.0
    engine = Engine(SigningKeys(key_file, lambda: now_s))
    engine.store.stored = strict.store.stored

    def is_believed(key: bytes) -> bool:
        engine.side.on_new_request("r", PROMPT.token_ids, params(OURS, key=key))
        loadable = engine.side.loadable_tokens("r", 0)
        engine.side.on_finished("r", BLOCKS)
        return loadable != 0

    for keys in ((KEY,), (KEY, OTHER_KEY), (OTHER_KEY, KEY), (OTHER_KEY,)):
        key_file.write_text("".join(f"{key.hex()}\n" for key in keys))
        now_s += CHECK_EVERY_S
        assert {key for key in (KEY, OTHER_KEY) if is_believed(key)} == set(keys)
    assert engine.side.take_refused() == {"forged": 2}


def test_an_invalid_plan_is_counted_too(engine: Engine) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for plan in (7, {}, {"v": 1, "segments": deep}):
        engine.side.on_new_request("r", PROMPT.token_ids, {"ragcache": plan})
    assert engine.side.take_refused() == {"invalid": 3}
