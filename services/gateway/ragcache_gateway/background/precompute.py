"""Computes chunks before questions ask for them, so that the first request finds their KV.

The chunks come from written documents, and from questions that computed them repeatedly
(``PrecomputeQueue`` orders them by benefit). For ``blend`` the engine computes the chunks of a
document in sequences, each chunk after others (``capture_sequence``). Stored chunks are left out.

Prefills delay questions. Four measures keep the delay short:

- A prefill is cut into slices, requests for longer and longer beginnings of the prompt. A question
  waits for one slice at most. Their length follows from the engine's costs (``slice_costs``).
- A slice begins while this gateway answers no question, and none is due soon (``IdleWindows``).
- A prefill has the lowest priority, where vLLM schedules by priority. So questions of other
  gateways come first.
- A slice ends at a block of the engine's prefix cache, so that the next one computes nothing again.

If vLLM's cache did not keep the beginning, the next slice computes it again, uncut. So the gateway
abandons the prefill once a request has computed much more than a slice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal

from ragcache_core.background.capture_sequence import (
    CONTEXT_CHUNKS,
    CONTEXT_SEQUENCES,
    SEQUENCE_TOKENS,
    context_size,
    fitting_chunks,
)
from ragcache_core.background.idle_gaps import ALIGNMENT_TOKENS, slice_ends
from ragcache_core.background.precompute_queue import (
    FULL_SHARE,
    PrecomputeQueue,
    Prefill,
    QueuedPrefill,
)
from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.plan.prompt import Prompt
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import checked_segments, longest_exact_chain
from ragcache_core.store_api import LookupKey
from ragcache_gateway.background.capture import (
    CaptureJob,
    TokenizedPrefill,
    context_job,
    sequence_job,
)
from ragcache_gateway.background.chunk_ranking import ChunkRanking
from ragcache_gateway.background.demand import AnsweredQuestion, prefill_demands
from ragcache_gateway.background.idle import IdleEngines, IdleTask, now_ms
from ragcache_gateway.background.slice_costs import SliceCosts
from ragcache_gateway.documents.removal_feed import TextRemoved
from ragcache_gateway.documents.writer import WrittenDocument
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.completion import Usage
from ragcache_gateway.engines.completion_stream import is_engine_loss
from ragcache_gateway.prompts.builder import PromptThread, TemplateFrame
from ragcache_kv.store_client.async_sharded import AsyncShardedStore
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.v1 import engine_pb2

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20
"""Most text in the queue. The first request computes what does not fit."""

HALF_LIFE_S = 3600.0
"""Time after which a retrieval counts half: idle windows may come once a day, and what clients ask
changes."""

CHARS_PER_TOKEN = 6
"""Characters that the queue gives for each token of a sequence. More than texts have on average;
what does not fit stays in the queue."""

LINGER_POLL_S = 0.1
LINGER_S = 1.0
"""Time that the last written document waits for others: chunks that come together are computed
after each other. Chunks that fill a sequence do not wait."""

MAX_RECENT = 4
"""Chunks that are remembered as context for later ones."""

RETRY_S = 5.0
"""Longest wait after consecutive failures; the first wait is FIRST_RETRY_S."""

FIRST_RETRY_S = 0.1

MAX_LOST_ENGINES = 2
"""Engines that may fail over one prefill: it could make the third fail, too."""


class _DocumentDeleted(Exception):
    """A document of a prefill was deleted meanwhile."""


@dataclass(slots=True)
class _Batch:
    """Sequences with the same context, which one engine has in its prefix cache."""

    engine: Engine
    context: tuple[TokenizedPrefill, ...]
    domain: str
    num_sequences: int = 0


class Precomputer(IdleTask):
    """The queue of prefills, and the tasks that work on it. For one event loop.

    Args:
        template: Token ids around the chunks of every prompt.
        reuse: How questions reuse KV that do not say it.
    """

    def __init__(
        self,
        idle: IdleEngines,
        template: TemplateFrame,
        reuse: Literal["exact", "blend"],
        prompts: PromptThread,
        store: AsyncShardedStore,
        retriever: RetrieverClient,
    ) -> None:
        super().__init__(idle)
        self._head = tuple(template.head)
        self._reuse = reuse
        self._prompts = prompts
        self._store = store
        self._queue = PrecomputeQueue(max_bytes=MAX_WAITING_BYTES, half_life_s=HALF_LIFE_S)
        self._ranking = ChunkRanking(self._queue, retriever)
        self._costs: dict[Engine, SliceCosts] = {}
        self._batch: _Batch | None = None
        self._recent: deque[TokenizedPrefill] = deque(maxlen=MAX_RECENT)
        self._last_written_s = -math.inf
        self._lost_engines: Counter[bytes] = Counter()  # by the name of the prefill
        self._consecutive_failures = 0

    def start(self) -> None:
        """Start to compute what the queue gets."""
        self._spawn(self._run())
        self._spawn(self._ranking.run())

    def text_removed(self, removal: TextRemoved) -> None:
        """Drop the chunks of a document that has lost text."""
        name = removal.document
        if name is None:
            self._recent.clear()
            self._batch = None
            self._queue.forget_all(removal.learned_at_ms)
        else:
            self._drop_context(name)
            self._queue.forget_document(name, removal.learned_at_ms)
            self._ranking.remove(name)
        self._show_queue()

    def document_written(self, written: WrittenDocument) -> None:
        """Replace the queued chunks of a document.

        Under ``exact`` no chunk of a written document is queued. A chunk would serve the prompts
        that begin with it, and before questions have come nothing tells which chunks those are.
        """
        name = written.document_name
        self._drop_context(name)
        self._queue.forget_document(name, written.written_at_ms - 1)
        if self._reuse == "blend":
            for ordinal, text in enumerate(written.chunks):
                prefill = Prefill((text,), (name,), written.written_at_ms, ordinal=ordinal)
                self._count_dropped(self._queue.add_written(prefill))
            self._ranking.add(written.collection, written.document_id)
            self._last_written_s = time.monotonic()
        self._show_queue()

    def _drop_context(self, document: str) -> None:
        """Compute no more chunks after those of this document."""
        kept = [one for one in self._recent if document not in one.queued.prefill.documents]
        self._recent = deque(kept, maxlen=MAX_RECENT)
        batch = self._batch
        if batch and any(document in one.queued.prefill.documents for one in batch.context):
            self._batch = None

    def question_answered(
        self, question: AnsweredQuestion, record: engine_pb2.RequestRecord
    ) -> None:
        """Queue what would have served a question, by the engine's record of it."""
        now = time.monotonic()
        for demand in prefill_demands(question, record, self._head):
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
            async with self._idle.window():  # the most beneficial prefills at that time, not now
                max_chars = CHARS_PER_TOKEN * self._max_tokens
                sequence = self._queue.next_sequence(now_ms(), max_chars)
            linger_s = self._last_written_s + LINGER_S - time.monotonic()
            if linger_s > 0 and _is_short(sequence, max_chars):
                await asyncio.sleep(min(linger_s, LINGER_POLL_S))
                continue
            # Empty if the document was deleted meanwhile.
            await self._try(sequence)
            self._show_queue()

    @property
    def _max_tokens(self) -> int:
        """Most tokens of a sequence: so many that the prompt fits the model's context."""
        return min(SEQUENCE_TOKENS, self._model.max_model_len - len(self._head) - 1)

    async def _try(self, sequence: Sequence[QueuedPrefill]) -> None:
        """Compute prefills, as far as they fit one prompt."""
        try:
            job = await self._job(sequence)
            if job is not None:
                sequence = [one.queued for one in job.prefills]
                await self._compute(job)
            self._consecutive_failures = 0
        except _DocumentDeleted:
            pass
        except InvalidInput as error:
            log.warning("precompute: refused %s error=%s", _log_fields(sequence), error)
            self._finish(sequence, "refused")
        except RagCacheError as error:
            log.info("precompute: postponed %s error=%s", _log_fields(sequence), error)
            self._postpone(sequence, is_loss=is_engine_loss(error))
            await self._wait_after_failure()
        except Exception:
            # One failing prefill must not stop the others.
            log.exception("precompute: failed %s", _log_fields(sequence))
            self._finish(sequence, "failed")

    def _finish(self, prefills: Sequence[QueuedPrefill], outcome: str) -> None:
        """Remove prefills that are still queued, and count their outcome."""
        for queued in prefills:
            if self._queue.is_queued(queued.prefill):
                self._queue.mark_done(queued.prefill)
                self._metrics.precomputed.labels(outcome, queued.source).inc()
                del self._lost_engines[queued.prefill.name]

    def _postpone(self, prefills: Sequence[QueuedPrefill], *, is_loss: bool) -> None:
        for queued in prefills:
            name = queued.prefill.name
            self._lost_engines[name] += is_loss
            if self._lost_engines[name] >= MAX_LOST_ENGINES:
                self._finish([queued], "failed")
            else:
                self._queue.postpone(queued.prefill)

    async def _wait_after_failure(self) -> None:
        """Wait, longer after each consecutive failure."""
        self._consecutive_failures += 1
        doublings = min(self._consecutive_failures - 1, 30)
        await asyncio.sleep(min(RETRY_S, FIRST_RETRY_S * 2.0**doublings))

    async def _job(self, sequence: Sequence[QueuedPrefill]) -> CaptureJob | None:
        """Return the job that computes what is not stored; None if all of it is.

        Raises:
            Unavailable: The store does not answer; it could not store the prefills either.
            InvalidInput: The one prefill is too long.
        """
        tokenized = await self._tokenize(sequence)
        if not tokenized:
            return None
        if not tokenized[0].queued.prefill.may_join_sequence:
            job = context_job(self._head, tokenized[0])
            self._check_length(job.prompt)
            if not await self._is_stored(job):
                return job
            self._finish(sequence, "stored")
            return None
        stored, missing = await self._split_by_storage(tokenized)
        self._finish([one.queued for one in stored], "stored")
        if not missing:
            return None
        context = self._context_for(missing, stored)
        sizes = [one.num_tokens for one in missing]
        max_tokens = self._max_tokens - sum(one.num_tokens for one in context)
        missing = missing[: fitting_chunks(sizes, max_tokens, is_first=not context)]
        job = sequence_job(self._head, missing, context)
        if context and len(job.prompt.token_ids) >= self._model.max_model_len:
            job = sequence_job(self._head, missing)
        self._check_length(job.prompt)
        return job

    def _context_for(
        self, missing: Sequence[TokenizedPrefill], stored: Sequence[TokenizedPrefill]
    ) -> tuple[TokenizedPrefill, ...]:
        """Return what to compute chunks after; empty for the first sequence of a batch."""
        batch, domain = self._batch, missing[0].queued.prefill.domain
        if batch is not None and not (
            batch.domain != domain
            or batch.num_sequences >= CONTEXT_SEQUENCES
            or batch.engine not in self._engines.known
            or batch.engine.failure is not None
            or any(self._queue.is_deleted(one.queued.prefill) for one in batch.context)
        ):
            batch.num_sequences += 1
            return batch.context
        sizes = [one.num_tokens for one in missing]
        room_tokens = (self._max_tokens - sizes[0]) // CONTEXT_CHUNKS
        if len(missing) > 1:
            context = tuple(missing[: context_size(sizes)])
            found: tuple[TokenizedPrefill, ...] = ()
        else:
            others = [
                one
                for one in (*stored, *self._recent)
                if one.num_tokens <= room_tokens and one.queued.prefill.domain == domain
            ]
            found = context = tuple(others[: context_size([one.num_tokens for one in others])])
        self._batch = _Batch(self._engines.choose(), context, domain) if context else None
        return found

    async def _tokenize(self, sequence: Sequence[QueuedPrefill]) -> list[TokenizedPrefill]:
        return await self._prompts.run(
            lambda prompts: [
                TokenizedPrefill(queued, tuple(map(prompts.encode_chunk, queued.prefill.texts)))
                for queued in sequence
            ]
        )

    def _check_length(self, prompt: Prompt) -> None:
        if len(prompt.token_ids) >= self._model.max_model_len:
            # Otherwise the engine would compute every beginning that fits, for nothing.
            raise InvalidInput("chunk", "is longer than the model's context", "cut it smaller")

    async def _split_by_storage(
        self, tokenized: Sequence[TokenizedPrefill]
    ) -> tuple[list[TokenizedPrefill], list[TokenizedPrefill]]:
        """Return the chunks that the store has after any prefix, and the others.

        Raises:
            Unavailable: The store does not answer for any of the others.
        """
        keys = [self._lookup_key(one) for one in tokenized]
        try:
            answers = await self._store.lookup(keys)
        except RagCacheError:
            if len(tokenized) == 1:
                raise
            # A shard that does not answer must not block the chunks of another.
            return await self._split_one_by_one(tokenized)
        stored: list[TokenizedPrefill] = []
        missing: list[TokenizedPrefill] = []
        for one, answer in zip(tokenized, answers, strict=True):
            (stored if answer.stored else missing).append(one)
        return stored, missing

    async def _split_one_by_one(
        self, tokenized: Sequence[TokenizedPrefill]
    ) -> tuple[list[TokenizedPrefill], list[TokenizedPrefill]]:
        stored: list[TokenizedPrefill] = []
        missing: list[TokenizedPrefill] = []
        for one in tokenized:
            try:
                found = await self._split_by_storage([one])
            except RagCacheError as error:
                log.info("precompute: postponed %s error=%s", _log_fields([one.queued]), error)
                self._queue.postpone(one.queued.prefill)
                continue
            stored += found[0]
            missing += found[1]
        if not stored and not missing:
            await self._wait_after_failure()
        return stored, missing

    def _lookup_key(self, one: TokenizedPrefill) -> LookupKey:
        job = sequence_job(self._head, [one])
        plan = job.plan(job.prompt, self._model)
        return LookupKey(plan.segments[-1].chunk)

    async def _is_stored(self, job: CaptureJob) -> bool:
        """Whether the store has every segment of a prompt, exactly. Raises Unavailable."""
        plan = job.plan(job.prompt, self._model)
        segments = checked_segments(plan, job.prompt.token_ids, self._model.space)
        answers = await self._store.lookup(
            [LookupKey.for_variant(named.variant) for named in segments]
        )
        infos = {stored.key: stored.info for answer in answers for stored in answer.stored}
        return len(longest_exact_chain(segments, infos)) == len(segments)

    async def _compute(self, job: CaptureJob) -> None:
        """Compute a job in slices, and finish each prefill that is complete.

        Raises:
            Unavailable: An engine or the retriever failed.
            InvalidInput: The engine refused it.
            _DocumentDeleted: A document of it was deleted meanwhile.
        """
        engine = self._engine_for(job)
        costs = await self._costs_of(engine, len(job.prompt.token_ids) // 2)
        # Each prompt begins with the template and the context, so the engine has them already.
        start = job.expected_cached // ALIGNMENT_TOKENS * ALIGNMENT_TOKENS
        spare = start + 2 * ALIGNMENT_TOKENS  # another request may have evicted them
        left = list(zip(job.prefills, job.ends, strict=True))
        for end in slice_ends(start, len(job.prompt.token_ids), costs.num_tokens):
            beginning = job.beginning(end)
            async with self._idle.window(costs.predict_s(start, end - start)):
                # Another gateway may have deleted a document of the prompt.
                await self._removals.catch_up()
                shown = (*job.context, *job.prefills)
                if any(self._queue.is_deleted(one.queued.prefill) for one in shown):
                    raise _DocumentDeleted
                began = time.monotonic()
                plan = job.plan(beginning, self._model)
                usage = await self._ask(engine, beginning, plan)
                seconds = time.monotonic() - began
            self._metrics.precompute_seconds.inc(seconds)
            computed = await _computed_tokens(engine, plan.request, usage)
            if computed > end - start + spare:
                log.info(
                    "precompute: engine evicted a beginning engine=%s computed=%d",
                    engine.address,
                    computed,
                )
                self._finish([one.queued for one, _ in left], "evicted")
                return
            costs.observe(start, end - start, seconds)
            spare = 2 * ALIGNMENT_TOKENS
            for one, complete_at in left:
                if complete_at <= end:
                    self._metrics.precomputed_tokens.inc(one.num_tokens)
                    if job.blends:
                        self._recent.append(one)
                    self._finish([one.queued], "computed")
            left = [(one, complete_at) for one, complete_at in left if complete_at > end]
            self._show_queue()
            start = end

    def _engine_for(self, job: CaptureJob) -> Engine:
        """Choose the engine that has the job's context in its prefix cache."""
        batch = self._batch
        if batch is None or not job.blends or batch.domain != job.domain:
            return self._engines.choose()
        if batch.engine.failure is not None:
            return self._engines.choose()
        return batch.engine

    async def _costs_of(self, engine: Engine, cached: int) -> SliceCosts:
        known = set(self._engines.known)
        self._costs = {one: costs for one, costs in self._costs.items() if one in known}
        costs = self._costs.setdefault(engine, SliceCosts())
        await costs.refresh(engine, cached)
        return costs

    async def _ask(self, engine: Engine, prompt: Prompt, plan: ReusePlan) -> Usage | None:
        """Have an engine compute a prompt, and return what it counted."""
        body = self._body(plan, prompt.token_ids, 1)
        async with AsyncExitStack() as stack:
            completion = await self._engines.complete_on(engine, body, stack)
            async for _ in completion.deltas():
                pass
            return completion.usage


def _is_short(sequence: Sequence[QueuedPrefill], max_chars: int) -> bool:
    """Whether a sequence might become longer with more documents."""
    if not all(one.source == "written" for one in sequence):
        return False
    num_chars = sum(len(text) for one in sequence for text in one.prefill.texts)
    return num_chars < FULL_SHARE * max_chars


def _log_fields(prefills: Sequence[QueuedPrefill]) -> str:
    documents = ",".join(sorted({name for one in prefills for name in one.prefill.documents}))
    num_chunks = sum(len(one.prefill.texts) for one in prefills)
    return f"documents={documents} chunks={num_chunks}"


async def _computed_tokens(engine: Engine, request: str, usage: Usage | None) -> int:
    """Return how many tokens of a prompt the engine computed; 0 if it does not say it."""
    if usage is not None and usage.prompt_tokens_details is not None:
        return usage.prompt_tokens - (usage.prompt_tokens_details.cached_tokens or 0)
    with contextlib.suppress(RagCacheError):
        record = await engine.request_record(request)
        return record.prompt_tokens - record.local_tokens - record.loaded_tokens
    return 0
