"""When what an early stage names is moved from the store's disk into its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KEY_BYTES, ChunkKey
from ragcache_core.plan.prompt import Prompt, assemble
from ragcache_core.planner.request_plan import (
    ChunkAction,
    ChunkDecision,
    PlanReason,
    RequestPlan,
)
from ragcache_core.planner.speculation import LEAST_SAVING_S
from ragcache_gateway.planning.request_planner import PrefilledChunks
from ragcache_gateway.prompts.builder import AnswerPrompt
from ragcache_gateway.prompts.prompt_text import PromptText
from ragcache_gateway.speculation.interim_stage import InterimStage, PrefillSteps, StagePrompt
from ragcache_gateway.speculation.prefetch import (
    PREFETCH_PROBABILITY,
    StagePrefetch,
    StorePrefetcher,
)
from tests.kit.wait import until

CHUNK = b"c" * KEY_BYTES
STAGE = InterimStage((), PREFETCH_PROBABILITY, 0.5, search_s=1.0, elapsed_s=1.0, asked_at_ms=0)
PROMPT = assemble([7], [[1]], [9])


class Shared:
    """Notes what is prefetched. It is its own planner."""

    def __init__(self) -> None:
        self.on_disk = True
        self.prefetched: list[Prompt] = []
        self.planner = self

    def is_on_disk_only(self, chunks: Sequence[ChunkKey]) -> bool:
        assert list(chunks) == [CHUNK]
        return self.on_disk

    async def prefetch(self, body: Mapping[str, Any], prompt: Prompt) -> None:
        self.prefetched.append(prompt)


class Question:
    """Makes the prompt of a question, and counts how often."""

    def __init__(self) -> None:
        self.built = 0
        self.action = ChunkAction.COMPUTE
        self.fails = False

    async def chunk_keys(self, stage: InterimStage) -> Sequence[ChunkKey]:
        return [CHUNK]

    async def build(self, stage: InterimStage, prefilled: Sequence[PrefilledChunks]) -> StagePrompt:
        self.built += 1
        if self.fails:
            raise InvalidInput("messages", "take too many tokens", "shorten them")
        decision = ChunkDecision(CHUNK, 1, self.action, PlanReason.RESIDENT)
        return StagePrompt(
            AnswerPrompt(PROMPT, PromptText("", "", ()), 1), RequestPlan((0,), "one", (decision,))
        )

    async def request(self, stage: InterimStage | None, prompt: AnswerPrompt) -> Mapping[str, Any]:
        return {}

    def steps(self) -> PrefillSteps:
        return PrefillSteps(self.chunk_keys, None, self.build, self.request, can_prefill=True)


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
def question() -> Question:
    return Question()


def prefetch_of(shared: Shared, question: Question) -> StagePrefetch:
    return StagePrefetch(cast("StorePrefetcher", shared), question.steps())


async def test_a_probable_stage_with_a_chunk_on_disk_is_prefetched_once(
    shared: Shared, question: Question
) -> None:
    prefetch = prefetch_of(shared, question)
    await prefetch.prefetch(STAGE)
    await prefetch.prefetch(STAGE)
    assert shared.prefetched == [PROMPT]
    assert question.built == 1


@pytest.mark.parametrize(
    "stage",
    [
        replace(STAGE, final_probability=PREFETCH_PROBABILITY - 0.01),
        # The search has less time left than can be saved.
        replace(STAGE, search_s=LEAST_SAVING_S),
        replace(STAGE, progress=1.0),
    ],
)
async def test_no_prompt_is_built_for_a_stage_that_can_gain_nothing(
    shared: Shared, question: Question, stage: InterimStage
) -> None:
    await prefetch_of(shared, question).prefetch(stage)
    assert question.built == 0
    assert not shared.prefetched


async def test_no_prompt_is_built_if_nothing_is_on_a_disk_only(
    shared: Shared, question: Question
) -> None:
    shared.on_disk = False
    prefetch = prefetch_of(shared, question)
    await prefetch.prefetch(STAGE)
    assert question.built == 0
    # A later stage may name another chunk.
    shared.on_disk = True
    await prefetch.prefetch(STAGE)
    assert shared.prefetched == [PROMPT]


async def test_what_the_engine_has_is_not_prefetched(shared: Shared, question: Question) -> None:
    question.action = ChunkAction.CACHED
    await prefetch_of(shared, question).prefetch(STAGE)
    assert not shared.prefetched


async def test_a_prompt_that_cannot_be_built_fails_nothing(
    shared: Shared, question: Question
) -> None:
    question.fails = True
    async with prefetch_of(shared, question) as prefetch:
        prefetch.on_stage(STAGE)
        await until(lambda: question.built)
    assert not shared.prefetched
