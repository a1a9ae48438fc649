"""Computes chunks before questions ask for them, so that the first request finds their KV.

The chunks come from written documents, and from questions that computed them repeatedly
(``PrecomputeQueue`` orders them by benefit). The engine computes each right after the template, one
at a time, in idle windows.

The gateway does not know what other gateways ask. Two measures keep their questions fast:

- A prefill has the lowest priority, where vLLM schedules by priority.
- A prefill is cut. vLLM schedules running requests before waiting ones, so a long prefill
  would use all tokens of every engine step until it ends. Each request asks for a longer beginning
  of the prompt, by half an engine step more than vLLM's own prefix cache has from the one before.
  A question that arrives shares the next engine step, and comes first in the one after it.

If vLLM's cache did not keep the beginning, the next request computes it again, uncut. So the
gateway abandons a chunk once a request has computed more than an engine step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from typing import Literal

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.plan.prompt import Prompt, assemble, plan_blend, plan_exact
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import checked_segments, longest_exact_chain
from ragcache_core.scheduling.precompute_queue import PrecomputeQueue, Prefill, QueuedPrefill
from ragcache_core.store_api import LookupKey
from ragcache_gateway.background.demand import AnsweredQuestion, prefill_demands
from ragcache_gateway.background.idle import LOWEST_PRIORITY, IdleWindows
from ragcache_gateway.documents.events import DocumentChanged
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.completion import transfer_params
from ragcache_gateway.engines.completion_stream import is_engine_loss
from ragcache_gateway.engines.pool import EnginePool
from ragcache_gateway.prompts.builder import PromptBuilder, TemplateFrame
from ragcache_gateway.prompts.served_model import ServedModel
from ragcache_gateway.status.metrics import Metrics
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_wire.v1 import engine_pb2

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20
"""Most text in the queue. The first request computes what does not fit."""

HALF_LIFE_S = 3600.0
"""Time after which a retrieval counts half: idle windows may come once a day, and what clients ask
changes."""

STEP_SHARE = 2
"""A request computes one part in this many of an engine step's tokens."""

UNKNOWN_STEP_TOKENS = 512
"""Assumed tokens of an engine step if the engine does not report them. Few engines have fewer
(vLLM's default is 2,048 or more), and a smaller step costs only more requests."""

RETRY_S = 5.0
"""Longest wait after consecutive failures; the first wait is FIRST_RETRY_S."""

FIRST_RETRY_S = 0.1

MAX_LOST_ENGINES = 2
"""Engines that may fail over one prefill: it could make the third fail, too."""


class _DocumentDeleted(Exception):
    """A document of a prefill was deleted meanwhile."""


class Precomputer:
    """The queue of prefills, and the task that works on it. For one event loop.

    Args:
        template: Token ids around the chunks of every prompt.
        reuse: How questions reuse KV that do not say it.
        tokenizing: Runs the prompt builder, which one thread may use at a time.
    """

    def __init__(
        self,
        model: ServedModel,
        template: TemplateFrame,
        reuse: Literal["exact", "blend"],
        *,
        prompts: PromptBuilder,
        tokenizing: Executor,
        engines: EnginePool,
        idle: IdleWindows,
        store: AsyncShardedStore,
        metrics: Metrics,
    ) -> None:
        self._model = model
        self._template = template
        self._reuse = reuse
        self._prompts = prompts
        self._tokenizing = tokenizing
        self._engines = engines
        self._idle = idle
        self._store = store
        self._metrics = metrics
        self._queue = PrecomputeQueue(max_bytes=MAX_WAITING_BYTES, half_life_s=HALF_LIFE_S)
        self._lost_engines: Counter[bytes] = Counter()  # by the name of the prefill
        self._consecutive_failures = 0
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to compute what the queue gets."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, and drop the queue."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def document_changed(self, change: DocumentChanged) -> int:
        """Replace the queued chunks of a document; removes no stored variants.

        Under ``exact`` no chunk of a written document is queued. A chunk would serve the prompts
        that begin with it, and before questions have come nothing tells which chunks those are.
        """
        if change.written_chunks is None:
            self._queue.forget_document(change.document_name, change.applied_at_ms)
        else:
            written_at_ms = change.requested_at_ms
            self._queue.forget_document(change.document_name, written_at_ms - 1)
            if self._reuse == "blend":
                for text in change.written_chunks:
                    prefill = Prefill((text,), (change.document_name,), written_at_ms)
                    self._count_dropped(self._queue.add_written(prefill))
        self._show_queue()
        return 0

    def question_answered(
        self, question: AnsweredQuestion, record: engine_pb2.RequestRecord
    ) -> None:
        """Queue what would have served a question, by the engine's record of it."""
        now = time.monotonic()
        for demand in prefill_demands(question, record, self._template.head):
            dropped = self._queue.record_question(
                demand.prefill, now, num_tokens=demand.num_tokens, saved_s=demand.saved_s
            )
            self._count_dropped(dropped)
        self._show_queue()

    def _count_dropped(self, dropped: Sequence[QueuedPrefill]) -> None:
        for queued in dropped:
            self._metrics.precomputed.labels("dropped", queued.source).inc()

    def _show_queue(self) -> None:
        self._metrics.precompute_waiting.set(len(self._queue))
        if len(self._queue):
            self._has_work.set()
        else:
            self._has_work.clear()
            self._lost_engines.clear()

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            async with self._idle.window():  # the most beneficial prefill at that time, not now
                queued = self._queue.advance_to_first(_now_ms())
            if queued is None:  # its document was deleted meanwhile
                self._show_queue()
                continue
            outcome = await self._try(queued.prefill)
            if outcome is None:
                continue
            self._consecutive_failures = 0
            del self._lost_engines[queued.prefill.name]
            self._queue.mark_done(queued.prefill)
            self._metrics.precomputed.labels(outcome, queued.source).inc()
            self._show_queue()

    async def _try(self, prefill: Prefill) -> str | None:
        """Compute a prefill and return the outcome; None if it is not done."""
        try:
            return await self._compute(prefill)
        except _DocumentDeleted:
            self._show_queue()
            return None
        except InvalidInput as error:
            log.warning("precompute: refused %s error=%s", _log_fields(prefill), error)
            return "refused"
        except RagCacheError as error:
            log.info("precompute: postponed %s error=%s", _log_fields(prefill), error)
            if is_engine_loss(error):
                self._lost_engines[prefill.name] += 1
            if self._lost_engines[prefill.name] >= MAX_LOST_ENGINES:
                return "failed"
            self._queue.postpone(prefill)
            await self._wait_after_failure()
            return None
        except Exception:
            # One failing prefill must not stop the others.
            log.exception("precompute: failed %s", _log_fields(prefill))
            return "failed"

    async def _wait_after_failure(self) -> None:
        """Wait, longer after each consecutive failure."""
        self._consecutive_failures += 1
        doublings = min(self._consecutive_failures - 1, 30)
        await asyncio.sleep(min(RETRY_S, FIRST_RETRY_S * 2.0**doublings))

    async def _compute(self, prefill: Prefill) -> str:
        """Compute a prefill unless it is stored, and return the outcome.

        Raises:
            Unavailable: An engine or the store failed.
            InvalidInput: The prefill is too long, or the engine refused it.
            _DocumentDeleted: A document of the prefill was deleted meanwhile.
        """
        prompt = await self._tokenize(prefill)
        if await self._is_stored(prefill, prompt):
            return "stored"
        engine = self._engines.choose()
        step_tokens = await _step_tokens(engine)
        for beginning in prompt_beginnings(prompt, step_tokens // STEP_SHARE):
            plan = self._plan(prefill, beginning)
            async with self._idle.window(), AsyncExitStack() as stack:
                if self._queue.is_deleted(prefill):
                    raise _DocumentDeleted
                body = self._body(beginning, plan)
                completion = await self._engines.complete_on(engine, body, stack)
                async for _ in completion.deltas():
                    pass
            is_last = beginning is prompt
            if not is_last and await _computed_tokens(engine, plan.request) > step_tokens:
                log.info(
                    "precompute: engine evicted a beginning engine=%s %s",
                    engine.address,
                    _log_fields(prefill),
                )
                return "evicted"
        return "computed"

    async def _tokenize(self, prefill: Prefill) -> Prompt:
        loop = asyncio.get_running_loop()
        chunks = await loop.run_in_executor(self._tokenizing, self._encode, prefill.texts)
        prompt = assemble(self._template.head, chunks, self._template.tail)
        if len(prompt.token_ids) >= self._model.max_model_len:
            # Otherwise the engine would compute every beginning that fits, for nothing.
            raise InvalidInput("chunk", "is longer than the model's context", "cut it smaller")
        return prompt

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._prompts.encode_chunk(text) for text in texts]

    def _body(self, prompt: Prompt, plan: ReusePlan) -> dict[str, object]:
        keys = self._model.plan_keys
        return {
            "model": self._model.name,
            "prompt": list(prompt.token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": True,
            "priority": LOWEST_PRIORITY,
            "kv_transfer_params": transfer_params(plan, prompt.token_ids, keys),
        }

    def _plan(self, prefill: Prefill, prompt: Prompt) -> ReusePlan:
        request = f"precompute-{uuid.uuid4().hex}"
        space, domain = self._model.space, self._model.domain
        documents = prefill.documents[: len(prompt.chunk_ends)]
        if prefill.mode == "blend":
            # The engine then observes the chunk's attention to the template, which blends need.
            at_ms = prefill.planned_at_ms
            return plan_blend(prompt, space, domain, request, 0.0, documents, at_ms)
        return plan_exact(prompt, space, domain, request, documents, prefill.planned_at_ms)

    async def _is_stored(self, prefill: Prefill, prompt: Prompt) -> bool:
        """Whether the store has what the prefill would compute.

        Raises:
            Unavailable: The store does not answer; it could not store the prefill either.
        """
        plan = self._plan(prefill, prompt)
        segments = checked_segments(plan, prompt.token_ids, self._model.space)
        if prefill.mode == "blend":
            [found] = await self._store.lookup([LookupKey(segments[-1].segment.chunk)])
            return bool(found.stored)
        answers = await self._store.lookup(
            [LookupKey.for_variant(named.variant) for named in segments]
        )
        infos = {stored.key: stored.info for answer in answers for stored in answer.stored}
        return len(longest_exact_chain(segments, infos)) == len(segments)


def prompt_beginnings(prompt: Prompt, step_tokens: int) -> list[Prompt]:
    """List beginnings of a prompt, each longer by step_tokens; the last one is the prompt itself.

    The first beginning has step_tokens after the template, which the engine usually has cached. If
    the template is longer than that, it is cut like the rest, and no segment before its end is
    complete.
    """
    first = prompt.head if prompt.head <= step_tokens else 0
    ends = range(first + step_tokens, len(prompt.token_ids), step_tokens)
    return [
        *(
            Prompt(
                prompt.token_ids[:end],
                prompt.head if prompt.head <= end else 0,
                tuple(chunk_end for chunk_end in prompt.chunk_ends if chunk_end <= end),
            )
            for end in ends
        ),
        prompt,
    ]


def _log_fields(prefill: Prefill) -> str:
    documents = ",".join(sorted(set(prefill.documents)))
    return f"documents={documents} chunks={len(prefill.texts)}"


async def _step_tokens(engine: Engine) -> int:
    """Return the most tokens that the engine computes in one step."""
    with contextlib.suppress(RagCacheError):
        costs = await engine.costs()
        return costs.prefill.pass_tokens or UNKNOWN_STEP_TOKENS
    return UNKNOWN_STEP_TOKENS


async def _computed_tokens(engine: Engine, request: str) -> int:
    """Return how many tokens of a prompt the engine computed; 0 if it has no record."""
    with contextlib.suppress(RagCacheError):
        record = await engine.request_record(request)
        return record.prompt_tokens - record.local_tokens - record.loaded_tokens
    return 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
