"""A stage before the final one of a search, and what can be made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragcache_core.identity.keys import ChunkKey
from ragcache_core.planner.request_plan import RequestPlan
from ragcache_gateway.planning.request_planner import PrefilledChunks
from ragcache_gateway.prompts.builder import AnswerPrompt
from ragcache_wire.v1 import retriever_pb2 as pb


@dataclass(frozen=True, slots=True)
class InterimStage:
    """A stage before the final one.

    Args:
        search_s: The retriever's time in the index up to this stage.
        elapsed_s: Time since the gateway requested the search.
        asked_at_ms: Unix time before the search began.
    """

    hits: Sequence[pb.Hit]
    final_probability: float
    progress: float
    search_s: float
    elapsed_s: float
    asked_at_ms: int


@dataclass(frozen=True, slots=True)
class StagePrompt:
    """A prompt before the search has ended, and the plan that has chosen its order and engine."""

    answer: AnswerPrompt
    plan: RequestPlan


@dataclass(frozen=True, slots=True)
class PrefillSteps:
    """How the prompt of a question is made before its search has ended.

    Args:
        chunk_keys: Returns the keys of a stage's chunks and of their windows.
        build_head: Builds the part of the prompt before the chunks, and plans it. None: the prompt
            has no such part.
        build: Builds the prompt with the chunks of a stage, and plans it with what engines have
            computed for the question so far.
        request: Makes the body of the engine's request that computes the prompt of a stage; None
            for the head.
        can_prefill: Whether an engine keeps the KV of a whole prompt for the next request. It
            always keeps that of the head.
    """

    chunk_keys: Callable[[InterimStage], Awaitable[Sequence[ChunkKey]]]
    build_head: Callable[[], Awaitable[StagePrompt]] | None
    build: Callable[[InterimStage, Sequence[PrefilledChunks]], Awaitable[StagePrompt]]
    request: Callable[[InterimStage | None, AnswerPrompt], Awaitable[Mapping[str, Any]]]
    can_prefill: bool
