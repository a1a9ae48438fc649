"""Blends held to a wanted quality (``spec.reuse.quality``): questions asked again in idle time.

Recent questions that were blended are asked again, greedily, in full and under every alpha of a
ladder (``core/blend/quality_control``); what came of it decides about later questions. Only while
no engine answers a question of this gateway, one at a time: when one comes meanwhile the engine is
told to stop, so that it waits for the step that runs. A gateway that is never idle learns nothing,
and blends as if no quality were wanted. Questions are kept in memory alone, and not for long.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from ragcache_core.blend.variant_selection import ALPHA
from ragcache_core.errors import InvalidInput, NotFound, RagCacheError, Unavailable
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import plan_blend, plan_compute
from ragcache_core.plan.reuse_plan import document_name
from ragcache_core.quality.controller import QualityController, QuestionReplay
from ragcache_core.quality.reservoir import AskedQuestion
from ragcache_gateway.background.idle import IDLE_POLL_S, LOWEST_PRIORITY, IdleTime
from ragcache_gateway.prompts.reuse_mode import Reuse
from ragcache_gateway.engines.client import Completion, Engine, is_lost
from ragcache_gateway.engines.completion import PART, transfer_params
from ragcache_gateway.engines.pool import Engines
from ragcache_gateway.status.metrics import Metrics
from ragcache_wire.v1 import engine_pb2
from ragcache_wire.watched.signing_keys import SigningKeys

log = logging.getLogger(__name__)

MAX_ANSWER_TOKENS = 64
"""Of an answer that is compared: enough to differ in, and soon over."""

RETRY_S = 5.0

PRUNE_S = 30.0


class _Interrupted(Exception):
    """A question has come."""


class QualityTrials:
    """What blends are made with, and the task that finds it out. For one event loop.

    quality: ROUGE-L F1 with full recomputation, in [0, 1]. budget: share of what comes from other
    prefixes that trials recompute at most.
    """

    def __init__(
        self,
        *,
        quality: float,
        budget: float,
        model: str,
        max_model_len: int,
        space: KVSpace,
        domain: str,
        engines: Engines,
        idle: IdleTime,
        metrics: Metrics,
        plan_keys: SigningKeys | None,
    ) -> None:
        self._control = QualityController(quality, budget)
        self._quality = quality
        self._budget = budget
        self._model = model
        self._max_model_len = max_model_len
        self._space = space
        self._domain = domain
        self._engines = engines
        self._idle = idle
        self._metrics = metrics
        self._plan_keys = plan_keys
        self._came = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        metrics.blend_alpha.set(ALPHA)

    def start(self) -> None:
        """Ask again what is answered from now on."""
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._prune())]

    async def close(self) -> None:
        """Forget all of it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def settle(self, reuse: Reuse) -> Reuse:
        """How a question that asks for this is answered; once for each question."""
        if reuse.mode != "blend":
            return reuse
        verdict = self._control.decision
        if verdict.computes_all:
            return replace(reuse, mode="exact", trial=self._control.sample_for_trial())
        return replace(reuse, alpha=verdict.alpha)

    def offer(
        self, question: AskedQuestion, reuse: Reuse, record: engine_pb2.RequestRecord
    ) -> None:
        """A question has been answered so; ask it again some time if that is a blend."""
        if record.blended_tokens or reuse.trial:
            self._control.offer(question, _now_ms(), is_sampled=reuse.trial)
            self._came.set()

    def delete(self, collection: str, document: str) -> None:
        """Some text of a document is gone: nothing that was asked about it is asked again."""
        self._control.forget_document(document_name(collection, document), _now_ms())

    async def _prune(self) -> None:
        """Idle time may not come for long, and what is too old must not stay until then."""
        while True:
            await asyncio.sleep(PRUNE_S)
            self._control.remove_expired(_now_ms())

    async def _run(self) -> None:
        while True:
            await self._came.wait()
            async with self._idle.turn():
                replay = self._control.begin_replay(_now_ms())
                if replay is None:
                    self._came.clear()
                    continue
                pause_s = await self._try(replay)
            await asyncio.sleep(pause_s)

    async def _try(self, replay: QuestionReplay) -> float:
        """Ask a question again; returns seconds to wait before the next one."""
        try:
            answer, record = await self._ask(replay)
        except _Interrupted:
            return 0.0  # the same once more
        except (InvalidInput, NotFound) as error:
            log.warning("a question is not tried: %s", error)
            outcome = "failed"
            self._control.abandon(replay)
        except RagCacheError as error:
            log.info("trials wait: %s", error)
            if not (is_lost(error) and self._control.record_engine_loss(replay)):
                return RETRY_S
            outcome = "failed"
        except Exception:
            # One question is not worth the rest of them.
            log.exception("a question is not tried")
            outcome = "failed"
            self._control.abandon(replay)
        else:
            blended, repaired = record.blended_tokens, record.recomputed_tokens
            is_trial = self._control.record_answer(replay, answer, blended, repaired)
            if replay.alpha is None:
                return 0.0  # what trials are compared with
            outcome = "tried" if is_trial else "unblended"
        self._metrics.blend_trials.labels(outcome).inc()
        self._show()
        return 0.0

    async def _ask(self, replay: QuestionReplay) -> tuple[str, engine_pb2.RequestRecord]:
        question, request = replay.question, f"trial-{uuid.uuid4().hex}"
        prompt = question.prompt
        if replay.alpha is None:
            plan = plan_compute(prompt, self._space, self._domain, request)
        else:
            plan = plan_blend(
                prompt,
                self._space,
                self._domain,
                request,
                self._budget,
                question.documents,
                question.planned_at_ms,
                replay.alpha,
            )
        room = self._max_model_len - len(prompt.token_ids)
        body = {
            "model": self._model,
            "prompt": list(prompt.token_ids),
            "max_tokens": min(MAX_ANSWER_TOKENS, room),
            "temperature": 0.0,
            "stream": True,
            "priority": LOWEST_PRIORITY,
            # Nothing else has this salt: what the engine itself still has of it is no trial.
            "cache_salt": request,
            "kv_transfer_params": transfer_params(
                replace(plan, trial=True), prompt.token_ids, self._plan_keys
            ),
        }
        said = []
        async with AsyncExitStack() as stack:
            engine = self._engines.choose()
            completion = await self._first_token(engine, body, stack)
            async for piece in completion.pieces():
                said.append(piece.text)
                if self._idle.is_over:
                    raise _Interrupted
        try:
            return "".join(said), await engine.request_record(request)
        except Unavailable as error:
            raise Unavailable(f"record of an {PART}", str(error)) from error

    async def _first_token(
        self, engine: Engine, body: dict[str, Any], stack: AsyncExitStack
    ) -> Completion:
        """Begin an answer. Raises Unavailable, InvalidInput, _Interrupted if a question comes."""
        begun = asyncio.ensure_future(self._engines.complete_on(engine, body, stack))
        try:
            while not begun.done():
                await asyncio.wait((begun,), timeout=IDLE_POLL_S)
                if not begun.done() and self._idle.is_over:
                    raise _Interrupted
            return begun.result()
        finally:
            if not begun.done():
                begun.cancel()
                await asyncio.gather(begun, return_exceptions=True)

    def _show(self) -> None:
        verdict = self._control.decision
        if not verdict.decided:
            return
        found = verdict.calibration
        self._metrics.blend_alpha.set(found.alpha if found else math.inf)
        self._metrics.blend_quality.set(found.quality if found else 1.0)
        self._metrics.blend_recomputed.set(found.fix_overhead if found else 1.0)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
