"""One prompt that an engine computes ahead."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

from ragcache_core.errors import RagCacheError
from ragcache_core.identity.keys import ChunkKey, common_tokens
from ragcache_core.plan.prompt import Prompt
from ragcache_core.planner.speculation import (
    GuessCost,
    computed_tokens,
    saved_s,
)
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.planning.request_planner import PrefilledChunks
from ragcache_gateway.speculation.interim_stage import StagePrompt
from ragcache_wire.tracing import NO_SPAN, Span

log = logging.getLogger(__name__)


class PrefillState(Enum):
    """How far a prefill is."""

    RUNNING = "running"
    COMPUTED = "computed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SpeculativePrompt:
    """A prompt that is computed ahead.

    Args:
        candidates: Names what it was built from. Equal candidates give equal prompts.
    """

    candidates: tuple[str, ...]
    staged: StagePrompt
    cost: GuessCost

    @property
    def prompt(self) -> Prompt:
        """The prompt without what its answer needs."""
        return self.staged.answer.prompt

    @property
    def cached(self) -> int:
        """Tokens that the engine was expected to have or to load."""
        return self.staged.plan.reused_tokens

    def chunks_before(self, end: int) -> tuple[ChunkKey, ...]:
        """Return the leading chunks, the segments of the head included, up to a token."""
        decisions = self.staged.plan.decisions
        ends = accumulate(decision.num_tokens for decision in decisions)
        return tuple(one.chunk for one, last in zip(decisions, ends, strict=True) if last <= end)


class SpeculativePrefill:
    """A prefill at low priority, in a task of its own, from its start until ``cancel``.

    A failure stays in the prefill: the question is asked again anyway. ``started_s`` and
    ``ended_s`` are on the clock of time.perf_counter; until the prefill has ended they are equal.

    Args:
        body: Body of the engine's completion.
        span: Its span, which ``end_span`` ends.
        on_computed: Is called when the engine has computed the whole prompt.
    """

    def __init__(
        self,
        speculative: SpeculativePrompt,
        engine: Engine,
        body: Mapping[str, Any],
        engines: EnginePool,
        on_computed: Callable[[SpeculativePrefill], None],
        span: Span = NO_SPAN,
    ) -> None:
        self.speculative = speculative
        self.engine = engine
        self.state = PrefillState.RUNNING
        self.started_s = time.perf_counter()
        self.ended_s = self.started_s
        self._ended_ns: int | None = None
        self._computed_tokens = 0
        self._span = span
        with span.current():  # the span of the engine's request is below it
            self._task = asyncio.create_task(self._run(body, engines, on_computed))

    async def cancel(self) -> None:
        """End the request, if it is running; the engine aborts it after its current pass."""
        if self.state is PrefillState.RUNNING:
            self.state = PrefillState.CANCELLED
            self._computed_tokens = self._expected_tokens()
            self._task.cancel()
        # Unlike gather, it does not interrupt the end of the task if the caller is cancelled.
        await asyncio.wait((self._task,))

    def end_span(self, outcome: str, wasted_tokens: int) -> None:
        """End the span at the time at which the prefill has ended.

        Args:
            outcome: What became of the prefill.
            wasted_tokens: See ``wasted_tokens``.
        """
        self._span.set(outcome=outcome, wasted_tokens=wasted_tokens)
        self._span.end(ended_ns=self._ended_ns)

    @property
    def saved_s(self) -> float:
        """Predicted seconds that the prefill has saved if it was right; 0 before its end."""
        return saved_s(self.speculative.cost, self._computed_tokens)

    @property
    def left_s(self) -> float:
        """Predicted seconds that the prefill still takes, if it did not wait."""
        elapsed_s = time.perf_counter() - self.started_s
        return max(0.0, self.speculative.cost.prefill_s - elapsed_s)

    def wasted_tokens(self, final: Prompt | None) -> int:
        """Return how many tokens were computed that a prompt does not have, as far as is known.

        Args:
            final: The prompt of the final stage; None: there is none.
        """
        useful = 0
        if final is not None:
            useful = common_tokens(self.speculative.prompt.token_ids, final.token_ids)
        computed_end = self.speculative.cached + self._computed_tokens
        return max(0, computed_end - max(self.speculative.cached, useful))

    def prefilled(self, *, is_confirmed: bool = False) -> PrefilledChunks:
        """Return what the engine has of the prompt now, as far as is known.

        Args:
            is_confirmed: Whether this is the question's prompt.
        """
        is_running = self.state is PrefillState.RUNNING
        end = len(self.speculative.prompt.token_ids)
        if self.state is PrefillState.FAILED:
            end = 0
        elif self.state is not PrefillState.COMPUTED:
            computed = self._expected_tokens() if is_running else self._computed_tokens
            end = self.speculative.cached + computed
        chunks = self.speculative.chunks_before(end)
        return PrefilledChunks(self.engine, chunks, is_running, is_confirmed)

    def _expected_tokens(self) -> int:
        """Return how many tokens the engine will have computed if it is told to end now."""
        return computed_tokens(self.speculative.cost, time.perf_counter() - self.started_s)

    async def _run(
        self,
        body: Mapping[str, Any],
        engines: EnginePool,
        on_computed: Callable[[SpeculativePrefill], None],
    ) -> None:
        try:
            async with AsyncExitStack() as stack:
                work_s = self.speculative.cost.prefill_s
                completion = await engines.complete_on(self.engine, body, stack, work_s)
                async for _ in completion.deltas():
                    pass
        except RagCacheError as error:
            self.state = PrefillState.FAILED
            log.info("speculation: guess failed engine=%s error=%s", self.engine.address, error)
        except Exception:
            self.state = PrefillState.FAILED
            log.exception("speculation: guess failed engine=%s", self.engine.address)
        else:
            self.state = PrefillState.COMPUTED
            self._computed_tokens = self.speculative.cost.uncached_tokens
            on_computed(self)
        finally:
            self.ended_s = time.perf_counter()
            self._ended_ns = time.time_ns()
