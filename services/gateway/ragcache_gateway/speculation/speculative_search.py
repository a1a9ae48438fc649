"""The prefills of one question while its search runs.

Each stage of the search may start a prefill of the prompt that its candidates give. When the search
has ended, the prefill is ended too, and the question is asked as without a prefill: at the priority
of questions, with all its options. The engine finds what the prefill has computed in its prefix
cache. So a client gets nothing before the search has ended, and a prefill never changes an answer.
That also holds for sampled answers: a prefill ends with the prompt, from which the engine samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ragcache_core.errors import RagCacheError
from ragcache_core.plan.prompt import Prompt
from ragcache_core.planner.speculation import (
    LEAST_SAVING_S,
    Decision,
    decide,
    is_beneficial,
    remaining_search_s,
)
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.explain.progress import NO_PROGRESS, Progress
from ragcache_gateway.explain.schema import GuessOutcome
from ragcache_gateway.planning.request_planner import PrefilledChunks
from ragcache_gateway.speculation.interim_stage import InterimStage, PrefillSteps, StagePrompt
from ragcache_gateway.speculation.prefetch import StagePrefetch
from ragcache_gateway.speculation.prefill import PrefillState, SpeculativePrefill, SpeculativePrompt
from ragcache_gateway.speculation.speculator import Speculator
from ragcache_wire.tracing import NO_SPAN
from ragcache_wire.v1 import retriever_pb2 as pb

log = logging.getLogger(__name__)

_WARM_UP = ()


@dataclass(frozen=True, slots=True)
class EndedPrefill:
    """A prefill that was computed during a search, and what became of it.

    Args:
        started_s: When it began, on the clock of time.perf_counter.
        num_tokens: Length of its prompt.
        wasted_tokens: Tokens that it computed and the question's prompt does not begin with.
    """

    started_s: float
    ended_s: float
    outcome: GuessOutcome
    num_tokens: int
    wasted_tokens: int


class SpeculativeSearch:
    """Starts and ends the prefills of one question. It is an async context.

    ``prefills`` are the ended ones, after ``settle``.

    Args:
        prefetch: Prefetches stages for which no prefill starts.
        collection: The collection that is searched.
        progress: Reports to the client what becomes of the prefills.
    """

    def __init__(
        self,
        speculator: Speculator,
        steps: PrefillSteps,
        prefetch: StagePrefetch,
        *,
        collection: str,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        self._speculator = speculator
        self._progress = progress
        self._prefetch = prefetch
        self._metrics = speculator.metrics
        self._steps = steps
        self._collection = collection
        self._usual_s = speculator.usual_search_s(collection)
        self._latest: InterimStage | None = None
        self._has_stage = asyncio.Event()
        self._prefill: SpeculativePrefill | None = None
        self._ended: list[SpeculativePrefill] = []
        self.prefills: tuple[EndedPrefill, ...] = ()
        self._is_settled = False
        self._task: asyncio.Task[None] | None = None
        self._span = NO_SPAN

    async def __aenter__(self) -> SpeculativeSearch:
        self._span = self._speculator.tracer.start_step("speculation")
        with self._span.current():  # spans of prefills are below it
            self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._stop()
        finally:
            if not self._is_settled:
                self._count_prefills(None)

    def on_stage(self, stage: InterimStage) -> None:
        """Take a stage of the search. An earlier one that was not considered yet is dropped."""
        self._latest = stage
        self._has_stage.set()

    async def settle(self, final: Prompt) -> tuple[PrefilledChunks, ...]:
        """End the prefills, because the search has ended.

        Args:
            final: The prompt of the question.

        Returns:
            What engines have computed during the search. At most one is confirmed.
        """
        await self._stop()
        self._is_settled = True
        confirmed = self._count_prefills(final)
        if self.prefills and self.prefills[-1].outcome != "warm-up":
            last = self.prefills[-1]
            self._progress.prefill_changed(last.outcome, last.num_tokens)
        prefilled = tuple(
            prefill.prefilled(is_confirmed=prefill is confirmed) for prefill in self._ended
        )
        self._ended.clear()
        self._latest = None
        return prefilled

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        await self._end_prefill()
        for prefill in self._ended:  # the task may have been interrupted while it ended one
            await prefill.cancel()

    async def _end_prefill(self) -> None:
        prefill, self._prefill = self._prefill, None
        if prefill is not None:
            # First, so that a prefill whose end is interrupted is still counted.
            self._ended.append(prefill)
            await prefill.cancel()

    def _count_prefills(self, final: Prompt | None) -> SpeculativePrefill | None:
        """Count what became of the prefills, and return the confirmed one."""
        prefills = [one for one in self._ended if one.speculative.candidates != _WARM_UP]
        is_confirmed = bool(
            prefills
            and final is not None
            and prefills[-1].speculative.prompt.token_ids == final.token_ids
            and prefills[-1].state is not PrefillState.FAILED
        )
        ended = []
        for prefill in self._ended:
            if prefill.speculative.candidates == _WARM_UP:
                outcome: GuessOutcome = "warm-up"
            elif prefill.state is PrefillState.FAILED:
                outcome = "failed"
            elif final is None:
                outcome = "abandoned"
            else:
                outcome = "confirmed" if is_confirmed and prefill is prefills[-1] else "wrong"
            ended.append(_ended_prefill(prefill, outcome, final))
        self.prefills = tuple(ended)
        for one in ended:
            if one.outcome != "warm-up":
                self._metrics.speculation_guesses.labels(one.outcome).inc()
        wasted_tokens = sum(one.wasted_tokens for one in ended)
        self._metrics.speculation_wasted_tokens.inc(wasted_tokens)
        if is_confirmed:
            self._metrics.speculation_saved_s.inc(prefills[-1].saved_s)
        for prefill, one in zip(self._ended, ended, strict=True):
            prefill.end_span(one.outcome, one.wasted_tokens)
        self._span.set(
            guesses=len(prefills), guess_confirmed=is_confirmed, wasted_tokens=wasted_tokens
        )
        self._span.end()
        return prefills[-1] if is_confirmed else None

    async def _run(self) -> None:
        try:
            if self._steps.build_head is not None:
                await self._attempt(self._warm_up(self._steps.build_head))
            while True:
                await self._has_stage.wait()
                self._has_stage.clear()
                if self._latest is not None:
                    await self._attempt(self._consider(self._latest))
        except Exception:
            # The question is answered without prefills.
            log.exception("speculation: stopped collection=%s", self._collection)

    async def _attempt(self, work: Awaitable[None]) -> None:
        # If there is no engine, or if the prompt cannot be built, the question itself reports it.
        with contextlib.suppress(RagCacheError):
            await work

    async def _warm_up(self, build_head: Callable[[], Awaitable[StagePrompt]]) -> None:
        """Compute the head of the prompt, if its engine does not have it."""
        if self._usual_s <= LEAST_SAVING_S:
            return  # no saving could be large enough
        head = await build_head()
        engine = self._speculator.planner.prefill_engine_of(head.plan)
        if engine is None:
            return
        cost = self._speculator.warm_up_cost(engine, head, self._usual_s)
        if cost is not None:
            await self._start(SpeculativePrompt(_WARM_UP, head, cost), engine, None)
            self._metrics.speculation_warm_ups.inc()

    async def _consider(self, stage: InterimStage) -> None:
        """Decide what to do at a stage, and do it."""
        own = self._prefill
        is_prefill = own is not None and own.speculative.candidates != _WARM_UP
        is_running = is_prefill and own is not None and own.state is not PrefillState.FAILED
        candidates = _candidates(stage.hits)
        has_changed = own is None or own.speculative.candidates != candidates
        engine, speculative = None, None
        if has_changed and candidates and self._may_prefill(stage):
            engine, speculative = await self._beneficial_prompt(stage, candidates)
        decision = decide(
            is_running=is_running, has_changed=has_changed, is_beneficial=speculative is not None
        )
        self._metrics.speculation_decisions.labels(decision.value).inc()
        self._span.event(
            decision.value,
            final_probability=stage.final_probability,
            progress=stage.progress,
            hits=len(stage.hits),
        )
        if is_prefill and own is not None:
            self._report_decision(decision, own)
        if decision is Decision.CANCEL:
            await self._end_prefill()
        elif engine is not None and speculative is not None and decision is not Decision.KEEP:
            await self._start(speculative, engine, stage)
        if speculative is None and has_changed and candidates:
            await self._prefetch.prefetch(stage)

    async def _start(
        self, speculative: SpeculativePrompt, engine: Engine, stage: InterimStage | None
    ) -> None:
        """Start a prefill in place of the running one."""
        body = await self._steps.request(stage, speculative.staged.answer)
        await self._end_prefill()
        self._prefill = self._speculator.start_prefill(speculative, engine, body)
        is_warm_up = speculative.candidates == _WARM_UP
        self._progress.prefill_changed(
            "warm-up" if is_warm_up else "started", len(speculative.prompt.token_ids)
        )

    def _report_decision(self, decision: Decision, own: SpeculativePrefill) -> None:
        num_tokens = len(own.speculative.prompt.token_ids)
        if decision is Decision.KEEP:
            self._progress.prefill_changed("kept", num_tokens)
        elif decision in (Decision.CANCEL, Decision.REPLACE):
            self._progress.prefill_changed("cancelled", num_tokens)

    def _may_prefill(self, stage: InterimStage) -> bool:
        """Check what needs no prompt first, because a prompt takes time to build."""
        may_prefill = self._speculator.may_prefill(stage.final_probability, self._prefill)
        return self._steps.can_prefill and may_prefill

    def _prefilled(self) -> list[PrefilledChunks]:
        """Return what engines have computed for the question so far."""
        started = [*self._ended, *([self._prefill] if self._prefill is not None else ())]
        return [prefill.prefilled() for prefill in started]

    async def _beneficial_prompt(
        self, stage: InterimStage, candidates: tuple[str, ...]
    ) -> tuple[Engine, SpeculativePrompt] | tuple[None, None]:
        """Build the prompt of a stage, with its engine; None if it should not be computed."""
        staged = await self._steps.build(stage, self._prefilled())
        engine = self._speculator.planner.prefill_engine_of(staged.plan)
        cost = self._speculator.cost(engine, staged) if engine is not None else None
        if engine is None or cost is None:
            return None, None
        remaining_s = remaining_search_s(
            stage.progress, stage.search_s, stage.elapsed_s, self._usual_s
        )
        load = self._speculator.load(engine, self._prefill)
        if not is_beneficial(stage.final_probability, remaining_s, cost, load):
            return None, None
        return engine, SpeculativePrompt(candidates, staged, cost)


def _ended_prefill(
    prefill: SpeculativePrefill, outcome: GuessOutcome, final: Prompt | None
) -> EndedPrefill:
    return EndedPrefill(
        started_s=prefill.started_s,
        ended_s=prefill.ended_s,
        outcome=outcome,
        num_tokens=len(prefill.speculative.prompt.token_ids),
        wasted_tokens=prefill.wasted_tokens(final),
    )


def _candidates(hits: Sequence[pb.Hit]) -> tuple[str, ...]:
    """Name the chunks of hits and of their windows, with the versions of their documents."""
    return tuple(
        f"{chunk.id} {chunk.content_hash}"
        for hit in hits
        for chunk in (hit.chunk, *hit.before, *hit.after)
    )
