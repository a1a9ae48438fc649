"""Which requests the connector accepts: plans, signatures, handoffs, and prompts without a plan."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.errors import Unavailable
from ragcache_core.identity.variant import Miss
from ragcache_core.plan.prompt import Prompt, assemble, plan_exact
from ragcache_core.plan.reuse_plan import NO_REUSE, Action, Handoff, ReusePlan
from ragcache_core.plan.segments import PIECE_TOKENS, checked_segments
from ragcache_core.plan.signature import sign
from ragcache_engine.scheduler.request import NewRequest
from ragcache_engine.scheduler.request_intake import RefusalReason
from ragcache_wire.watched.signing_keys import SigningKeys
from ragcache_wire.watched.watched_file import CHECK_EVERY_S
from tests.kit.scheduler import (
    BLOCKS,
    LENGTH,
    PLAIN,
    PROMPT,
    SPACE,
    SchedulerHarness,
)
from tests.kit.wait import wait_until


def test_a_short_prompt_without_a_plan_is_left_to_vllm(engine: SchedulerHarness) -> None:
    engine.store.outage = AssertionError("asked")
    assert len(PROMPT.token_ids) < PIECE_TOKENS
    engine.scheduler.on_new_request(NewRequest("plain", PROMPT.token_ids, None))
    engine.scheduler.on_new_request(
        NewRequest("other", PROMPT.token_ids, {"do_remote_prefill": True})
    )
    assert engine.scheduler.loadable_tokens("plain", 0) == 0
    assert engine.prefill("other") == []


def test_pieces_of_a_prompt_without_a_plan_are_saved_once_and_loaded(
    engine: SchedulerHarness,
) -> None:
    loaded, saved = engine.plain("first")
    assert (loaded, len(saved)) == (0, 3)
    assert all(held.info.provenance.exact for held in engine.store.stored.values())
    assert engine.plain("again") == (3 * PIECE_TOKENS, [])
    # A prompt with another end shares the full pieces of the common prefix.
    other = [*PLAIN[: 2 * PIECE_TOKENS + 40], *range(PIECE_TOKENS)]
    loaded, saved = engine.plain("other", other)
    assert (loaded, len(saved)) == (2 * PIECE_TOKENS, 1)


def test_the_last_token_of_a_fully_stored_prompt_is_computed(engine: SchedulerHarness) -> None:
    engine.plain("first", PLAIN[: 2 * PIECE_TOKENS])
    assert engine.plain("again", PLAIN[: 2 * PIECE_TOKENS])[0] == 2 * PIECE_TOKENS - 1


def test_prefixes_without_a_plan_are_shared_only_with_the_same_salt(
    engine: SchedulerHarness,
) -> None:
    engine.plain("first", cache_salt="mine")
    assert engine.plain("mine", cache_salt="mine")[0] == 3 * PIECE_TOKENS
    assert engine.plain("no salt")[0] == 0
    assert engine.plain("other salt", cache_salt="other")[0] == 0


def test_a_request_without_a_plan_has_no_record(engine: SchedulerHarness) -> None:
    engine.plain("first")
    assert engine.records.get("") is None
    assert engine.records.get("first") is None


def test_a_request_that_vllm_would_not_cache_is_left_to_vllm(engine: SchedulerHarness) -> None:
    engine.plain("first")
    assert engine.plain("again", cacheable=False) == (0, [])


def test_a_request_can_turn_its_reuse_off(strict: SchedulerHarness) -> None:
    strict.plain("first")
    known = dict(strict.store.stored)
    off = {"ragcache": NO_REUSE}
    assert strict.plain("again", params=off, cache_salt="again") == (0, [])
    assert strict.plain("known", params=off) == (0, [])
    assert strict.store.stored == known
    assert not strict.scheduler.take_counts().refused_plans
    assert strict.plain("loads")[0] == 3 * PIECE_TOKENS


def test_reuse_without_a_plan_can_be_turned_off() -> None:
    engine = SchedulerHarness(plain_prefixes=False)
    assert engine.plain("first") == (0, [])
    assert engine.store.stored == {}


def test_a_store_outage_leaves_a_request_without_a_plan_to_vllm(engine: SchedulerHarness) -> None:
    engine.store.outage = Unavailable("cachestore", "gone")
    assert engine.plain("first") == (0, [])


def test_a_handoff_covers_all_tokens_but_the_last() -> None:
    prefiller = SchedulerHarness()
    prefiller.arrive("r", handoff=Handoff.PREFILL)
    assert prefiller.loaded("r") == 0
    saves = prefiller.saves("r", pieces=3)
    assert [job.span.end for job in saves] == [*(PROMPT.head, *PROMPT.chunk_ends), LENGTH - 1]
    assert all(job.hands_off for job in saves)
    prefiller.scheduler.on_finished("r", BLOCKS)
    decoder = SchedulerHarness(store=prefiller.store)
    decoder.arrive("r", handoff=Handoff.DECODE)
    assert decoder.loaded("r") == LENGTH - 1
    assert decoder.prefill("r", computed=LENGTH - 1) == []
    decoder.scheduler.on_finished("r", BLOCKS)
    assert decoder.record("r").miss == ""


def test_a_handoff_is_saved_even_if_the_lookup_failed() -> None:
    prefiller = SchedulerHarness()
    prefiller.store.outage = Unavailable("cachestore", "busy")
    prefiller.arrive("r", handoff=Handoff.PREFILL)
    assert prefiller.loaded("r") == 0
    ends = [job.span.end for job in prefiller.saves("r", pieces=3)]
    assert ends == [*(PROMPT.head, *PROMPT.chunk_ends), LENGTH - 1]


def test_a_decoding_engine_waits_while_another_one_computes() -> None:
    decoder = SchedulerHarness()
    decoder.arrive("r", handoff=Handoff.DECODE)

    def has_asked_again() -> bool:
        assert decoder.scheduler.loadable_tokens("r", 0) is None
        return decoder.store.num_lookups == 3

    wait_until(has_asked_again)
    prefiller = SchedulerHarness(store=decoder.store)
    prefiller.arrive("r", handoff=Handoff.PREFILL)
    assert prefiller.loaded("r") == 0
    prefiller.prefill("r")
    assert decoder.loaded("r") == LENGTH - 1


def test_after_the_handoff_wait_the_engine_computes_and_saves_the_chunks() -> None:
    decoder = SchedulerHarness(handoff_wait_s=0.03)
    decoder.arrive("r", handoff=Handoff.DECODE)
    assert decoder.loaded("r") == 0
    ends = [job.span.end for job in decoder.saves("r", pieces=2)]
    assert ends == [PROMPT.head, *PROMPT.chunk_ends]
    decoder.scheduler.on_finished("r", BLOCKS)
    record = decoder.record("r")
    assert record.miss == "handoff timed out"
    assert record.prefill_s >= 0.03, "the wait is that for the other engine's prefill"


def test_a_decoding_engine_does_not_wait_for_a_store_that_is_away_or_lost() -> None:
    decoder = SchedulerHarness()
    decoder.store.outage = Unavailable("cachestore", "gone")
    decoder.arrive("away", handoff=Handoff.DECODE)
    assert decoder.loaded("away") == 0
    decoder.store.outage = None
    first = checked_segments(plan_exact(PROMPT, SPACE, "public", "r"), PROMPT.token_ids, SPACE)[0]
    decoder.store.misses = {first.variant: Miss.LOST}
    decoder.arrive("lost", handoff=Handoff.DECODE)
    assert decoder.loaded("lost") == 0


def test_a_decoding_engine_does_not_wait_for_a_few_tokens() -> None:
    decoder = SchedulerHarness()
    decoder.arrive("r", handoff=Handoff.DECODE)
    assert decoder.scheduler.loadable_tokens("r", LENGTH - 10) == 0


def test_what_a_plan_has_computed_is_handed_off_too() -> None:
    """Such as a head with a date, and what comes after it."""
    exact = plan_exact(PROMPT, SPACE, "public", "r")
    first, *rest = exact.segments
    segments = (first, *(replace(one, action=Action.COMPUTE) for one in rest))
    engine = SchedulerHarness()
    for part in Handoff:
        plan = replace(exact, segments=segments, handoff=part)
        new = NewRequest(part, PROMPT.token_ids, {"ragcache": plan.encode()})
        engine.scheduler.on_new_request(new)
        loads = part is Handoff.DECODE
        assert engine.loaded(part) == (LENGTH - 1 if loads else 0)
        engine.prefill(part, computed=LENGTH - 1 if loads else 0)
        engine.scheduler.on_finished(part, BLOCKS)
    assert engine.record("r").miss == ""


@pytest.mark.parametrize("part", Handoff)
def test_a_plan_for_other_tokens_is_not_handed_off(part: Handoff) -> None:
    other = assemble(range(20), [range(100, 140), range(201, 251), range(300, 330)], range(9))
    plan = replace(plan_exact(PROMPT, SPACE, "public", "r"), handoff=part)
    engine = SchedulerHarness()
    params = {"ragcache": plan.encode()}
    engine.scheduler.on_new_request(NewRequest("r", other.token_ids, params))
    assert engine.loaded("r") == 0


def test_a_request_with_a_refused_plan_does_not_count_as_one_without_a_plan(
    engine: SchedulerHarness,
) -> None:
    engine.scheduler.on_new_request(NewRequest("r", PLAIN, {"ragcache": {"v": 0}}))
    assert engine.scheduler.loadable_tokens("r", 0) == 0
    assert engine.scheduler.step([("r", 0, len(PLAIN))], lambda _: BLOCKS).saves == ()


def test_a_plan_for_other_tokens_is_not_served(warm: SchedulerHarness) -> None:
    other = assemble(range(20), [range(100, 140), range(201, 251), range(300, 330)], range(9))
    plan = plan_exact(PROMPT, SPACE, "public", "forged").encode()
    warm.scheduler.on_new_request(NewRequest("forged", other.token_ids, {"ragcache": plan}))
    # Template and first chunk match. From the second chunk on the tokens do not hash to the plan.
    assert warm.scheduler.loadable_tokens("forged", 0) == PROMPT.chunk_ends[0]


def test_a_malformed_plan_is_refused(engine: SchedulerHarness) -> None:
    whole = plan_exact(PROMPT, SPACE, "public", "r").encode()
    engine.scheduler.on_new_request(NewRequest("r", PROMPT.token_ids, {"ragcache": whole[:-4]}))
    assert engine.scheduler.loadable_tokens("r", 0) == 0
    assert engine.prefill("r") == []


KEY, OTHER_KEY = bytes([1] * 32), bytes([2] * 32)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"{KEY.hex()}\n")
    return path


@pytest.fixture
def strict(warm: SchedulerHarness, key_file: Path) -> SchedulerHarness:
    """An engine that requires signatures, with a store that has the whole prompt."""
    engine = SchedulerHarness(SigningKeys(key_file))
    engine.store.stored = dict(warm.store.stored)
    return engine


def params(
    plan: ReusePlan, prompt: Prompt = PROMPT, key: bytes = KEY, age_s: float = 0.0
) -> dict[str, Any]:
    plan_text = plan.encode()
    signature = sign(plan_text, prompt.token_ids, key, time.time() - age_s)
    return {"ragcache": plan_text, "ragcache_signature": signature}


def test_a_signed_plan_is_accepted(strict: SchedulerHarness) -> None:
    plan = plan_exact(PROMPT, SPACE, "public", "r")
    strict.scheduler.on_new_request(NewRequest("r", PROMPT.token_ids, params(plan)))
    assert strict.scheduler.loadable_tokens("r", 0) == PROMPT.chunk_ends[-1]
    assert not strict.scheduler.take_counts().refused_plans


OTHER_PROMPT = assemble(range(20), [range(500, 540)], range(9))


OURS, THEIRS = (plan_exact(PROMPT, SPACE, domain, "r") for domain in ("public", "tenant"))


FORGED: dict[str, tuple[dict[str, Any], RefusalReason]] = {
    "no signature": ({"ragcache": OURS.encode()}, RefusalReason.UNSIGNED),
    "null": ({"ragcache": OURS.encode(), "ragcache_signature": None}, RefusalReason.UNSIGNED),
    "another key": (params(OURS, key=OTHER_KEY), RefusalReason.FORGED),
    "another prompt": (params(OURS, OTHER_PROMPT), RefusalReason.FORGED),
    "another domain": (params(OURS) | {"ragcache": THEIRS.encode()}, RefusalReason.FORGED),
    "no text": ({"ragcache": OURS.encode(), "ragcache_signature": [1]}, RefusalReason.FORGED),
    "no plan": ({"ragcache": 7, "ragcache_signature": "0" * 64}, RefusalReason.FORGED),
    "old": (params(OURS, age_s=91), RefusalReason.EXPIRED),
    "of the future": (params(OURS, age_s=-3600), RefusalReason.EXPIRED),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_plan_without_a_valid_signature_loads_and_saves_nothing(
    strict: SchedulerHarness, case: str
) -> None:
    sent, reason = FORGED[case]
    strict.scheduler.on_new_request(NewRequest("r", PROMPT.token_ids, sent))
    assert strict.scheduler.loadable_tokens("r", 0) == 0
    strict.store.stored.clear()
    strict.scheduler.on_allocated("r", BLOCKS, 0)
    assert strict.prefill("r") == []
    assert strict.scheduler.on_finished("r", BLOCKS) is False
    assert strict.records.get("r") is None
    assert strict.scheduler.take_counts().refused_plans == {reason.value: 1}
    assert not strict.scheduler.take_counts().refused_plans


def test_without_keys_any_plan_is_accepted_and_a_warning_is_logged_once(
    warm: SchedulerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.ragcache"):
        SchedulerHarness()
        assert [m for m in caplog.messages if "RAGCACHE_SIGNING_KEY_FILE is not set" in m]
        caplog.clear()
        for name in ("a", "b"):
            warm.arrive(name)
            assert warm.scheduler.loadable_tokens(name, 0) == PROMPT.chunk_ends[-1]
    assert caplog.messages == []


def test_signing_keys_can_be_rotated_while_the_engine_runs(
    strict: SchedulerHarness, key_file: Path
) -> None:
    now_s = 0.0
    engine = SchedulerHarness(SigningKeys(key_file, lambda: now_s))
    engine.store.stored = strict.store.stored

    def is_accepted(key: bytes) -> bool:
        engine.scheduler.on_new_request(NewRequest("r", PROMPT.token_ids, params(OURS, key=key)))
        loadable = engine.scheduler.loadable_tokens("r", 0)
        engine.scheduler.on_finished("r", BLOCKS)
        return loadable != 0

    for keys in ((KEY,), (KEY, OTHER_KEY), (OTHER_KEY, KEY), (OTHER_KEY,)):
        # Swapped as Kubernetes does, because the time of a file may stay in spite of a change.
        new_file = key_file.with_suffix(".new")
        new_file.write_text("".join(f"{key.hex()}\n" for key in keys))
        new_file.replace(key_file)
        now_s += CHECK_EVERY_S
        assert {key for key in (KEY, OTHER_KEY) if is_accepted(key)} == set(keys)
    assert engine.scheduler.take_counts().refused_plans == {"forged": 2}


def test_an_invalid_plan_is_counted(engine: SchedulerHarness) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for plan in (7, {}, {"v": 2, "segments": deep}):
        engine.scheduler.on_new_request(NewRequest("r", PROMPT.token_ids, {"ragcache": plan}))
    assert engine.scheduler.take_counts().refused_plans == {"invalid": 3}
