"""Holds blends to a quality target (``spec.reuse.quality``) by asking questions again.

The gateway keeps recent questions that were blended, in memory only and not for long. In idle
windows it asks them again, greedily: once in full, and once under each alpha of a ladder. The
results decide the alpha of later questions (``QualityController``).

When a question arrives during a trial, the engine is told to stop, so that the question waits only
for the step that runs. A gateway that is never idle learns nothing. Until there is a decision, its
questions are blended only if a report allows it (``QualityGate``). Otherwise they are reused
exactly, and some of them are kept for trials.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from ragcache_core.blend.variant_selection import ALPHA
from ragcache_core.errors import InvalidInput, NotFound, RagCacheError, Unavailable
from ragcache_core.quality.controller import (
    AskedQuestion,
    QualityController,
    QualityDecision,
    QuestionReplay,
)
from ragcache_gateway.background.idle import IDLE_POLL_S, IdleEngines, IdleTask, now_ms
from ragcache_gateway.documents.removal_feed import TextRemoved
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.completion import ENGINE
from ragcache_gateway.engines.completion_stream import Completion, is_engine_loss
from ragcache_gateway.prompts.reuse_mode import Mode, ReuseMode, plan_reuse
from ragcache_wire.v1 import engine_pb2

log = logging.getLogger(__name__)

MAX_ANSWER_TOKENS = 64
"""Tokens of an answer that trials compare: enough to differ in, and quickly computed."""

RETRY_S = 5.0

EXPIRY_CHECK_S = 30.0

STEP_S = 0.25
"""Assumed time of the engine step that a question may have to wait for."""


class _QuestionArrived(Exception):
    """A question has arrived during a trial."""


class QualityTrials(IdleTask):
    """Decides how questions are blended, and runs the trials behind that. For one event loop.

    Args:
        quality: Target ROUGE-L F1 with full recomputation, in [0, 1].
        max_recompute_share: Most that trials recompute, as a share of the tokens taken from after
            other prefixes.
    """

    def __init__(self, idle: IdleEngines, quality: float, max_recompute_share: float) -> None:
        super().__init__(idle)
        self._controller = QualityController(quality, max_recompute_share)
        self._max_recompute_share = max_recompute_share
        self._metrics.blend_alpha.set(ALPHA)

    def start(self) -> None:
        """Start to ask questions again that are answered from now on."""
        self._spawn(self._run())
        self._spawn(self._remove_expired())

    @property
    def decision(self) -> QualityDecision:
        """What the trials have decided so far."""
        return self._controller.decision

    def adopt(self, decision: QualityDecision) -> None:
        """Use a decision of another gateway, or of an earlier run, until there is an own one."""
        self._controller.adopt(decision)
        self._show_decision()

    def apply_decision(self, reuse: ReuseMode, *, may_blend: bool) -> ReuseMode:
        """Return how to reuse KV for a question that wants a blend; call it once per question."""
        if not may_blend:
            return replace(reuse, mode="exact", trial=self._controller.sample_for_trial())
        return replace(reuse, alpha=self._controller.decision.alpha)

    def question_answered(
        self, question: AskedQuestion, reuse: ReuseMode, record: engine_pb2.RequestRecord
    ) -> None:
        """Keep a question for trials if it was blended, or would be if it were asked again."""
        if record.blended_tokens or reuse.trial:
            self._controller.offer(question, now_ms(), is_sampled=reuse.trial)
            self._has_work.set()

    def text_removed(self, removal: TextRemoved) -> None:
        """Drop the questions about a document that has lost text."""
        if removal.document is None:
            self._controller.forget_all(removal.learned_at_ms)
        else:
            self._controller.forget_document(removal.document, removal.learned_at_ms)

    async def _remove_expired(self) -> None:
        """Drop old questions, as an idle window may not come before they expire."""
        while True:
            await asyncio.sleep(EXPIRY_CHECK_S)
            self._controller.remove_expired(now_ms())

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            async with self._idle.window(STEP_S):
                wait_s = await self._try_next()
            await asyncio.sleep(wait_s)

    async def _try_next(self) -> float:
        """Ask the next question again and return the seconds to wait before another one."""
        if self._controller.begin_replay(now_ms()) is None:
            self._has_work.clear()
            return 0.0
        try:
            # Another gateway may have deleted a document of the question.
            await self._removals.catch_up()
        except RagCacheError as error:
            log.info("quality trials: question postponed error=%s", error)
            return RETRY_S
        replay = self._controller.begin_replay(now_ms())
        return 0.0 if replay is None else await self._try(replay)

    async def _try(self, replay: QuestionReplay) -> float:
        """Ask a question again and return the seconds to wait before the next one."""
        try:
            answer, record = await self._ask(replay)
        except _QuestionArrived:
            return 0.0  # the controller gives the same replay again
        except (InvalidInput, NotFound) as error:
            log.warning("quality trials: question refused error=%s", error)
            outcome = "failed"
            self._controller.abandon(replay)
        except RagCacheError as error:
            log.info("quality trials: question postponed error=%s", error)
            if not (is_engine_loss(error) and self._controller.record_engine_loss(replay)):
                return RETRY_S
            outcome = "failed"
        except Exception:
            # One failing question must not stop the others.
            log.exception("quality trials: question failed")
            outcome = "failed"
            self._controller.abandon(replay)
        else:
            blended, recomputed = record.blended_tokens, record.recomputed_tokens
            is_trial = self._controller.record_answer(replay, answer, blended, recomputed)
            if replay.alpha is None:
                return 0.0  # the reference that trials are compared with
            outcome = "tried" if is_trial else "unblended"
        self._metrics.blend_trials.labels(outcome).inc()
        self._show_decision()
        return 0.0

    async def _ask(self, replay: QuestionReplay) -> tuple[str, engine_pb2.RequestRecord]:
        """Ask a question again; return the answer and the engine's record.

        Raises:
            RagCacheError: The engine failed or refused it, or has no record.
            _QuestionArrived: A question of a client arrived meanwhile.
        """
        request = f"trial-{uuid.uuid4().hex}"
        # In a thread, because it hashes, signs and copies all tokens.
        body = await asyncio.to_thread(self._request_body, replay, request)
        texts = []
        async with AsyncExitStack() as stack:
            engine = self._engines.choose()
            completion = await self._start(engine, body, stack)
            async for delta in completion.deltas():
                texts.append(delta.text)
                if self._idle.has_ended:
                    raise _QuestionArrived
        try:
            return "".join(texts), await engine.request_record(request)
        except Unavailable as error:
            raise Unavailable(f"record of an {ENGINE}", str(error)) from error

    def _request_body(self, replay: QuestionReplay, request: str) -> dict[str, Any]:
        mode: Mode = "off" if replay.alpha is None else "blend"
        reuse = ReuseMode(mode, self._max_recompute_share, replay.alpha)
        plan = replace(plan_reuse(reuse, replay.question, self._model, request), trial=True)
        token_ids = replay.question.prompt.token_ids
        left_tokens = self._model.max_model_len - len(token_ids)
        return self._body(plan, token_ids, min(MAX_ANSWER_TOKENS, left_tokens))

    async def _start(
        self, engine: Engine, body: dict[str, Any], stack: AsyncExitStack
    ) -> Completion:
        """Start an answer. Raises Unavailable, InvalidInput or _QuestionArrived."""
        starting = asyncio.ensure_future(self._engines.complete_on(engine, body, stack))
        try:
            while not starting.done():
                await asyncio.wait((starting,), timeout=IDLE_POLL_S)
                if not starting.done() and self._idle.has_ended:
                    raise _QuestionArrived
            return starting.result()
        finally:
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)

    def _show_decision(self) -> None:
        decision = self._controller.decision
        if not decision.decided:
            return
        found = decision.calibration
        self._metrics.blend_alpha.set(found.alpha if found else math.inf)
        self._metrics.blend_quality.set(found.quality if found else 1.0)
        self._metrics.blend_recomputed.set(found.fix_overhead if found else 1.0)
