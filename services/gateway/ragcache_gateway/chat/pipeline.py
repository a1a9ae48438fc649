"""One answer: retrieve, build the prompt, plan, run the engine, account for it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial

from ragcache_core.errors import NotFound, RagCacheError, Unavailable
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.reuse_plan import document_name
from ragcache_core.quality.reservoir import AskedQuestion
from ragcache_gateway.background.quality_trials import QualityTrials
from ragcache_gateway.prompts.passages import Passage, citations
from ragcache_gateway.prompts.conversation import read_conversation
from ragcache_gateway.background.demand import Question
from ragcache_gateway.prompts.builder import PromptBuilder
from ragcache_gateway.chat.search import Retrieved, retrieve
from ragcache_gateway.prompts.reuse_mode import Reuse, plan_reuse, wanted_reuse
from ragcache_gateway.chat.schema import (
    AnswerMessage,
    CacheUse,
    ChatCompletion,
    ChatRequest,
    Choice,
    Citation,
    RagCacheAnswer,
    Timing,
    Usage,
)
from ragcache_gateway.documents.retriever_errors import in_rest_terms
from ragcache_gateway.engines.client import Completion, Engine
from ragcache_gateway.engines.completion import PART, Piece, completion_body
from ragcache_gateway.engines.pool import Engines
from ragcache_gateway.http.request_span import note_refusal
from ragcache_gateway.status.metrics import Metrics
from ragcache_wire.clients.retriever_client import RetrieverClient
from ragcache_wire.tracing import Tracer, current_span
from ragcache_wire.v1 import engine_pb2
from ragcache_wire.watched.signing_keys import SigningKeys

log = logging.getLogger(__name__)

DOMAIN = "public"
"""Access domain of every document: there are no tenants yet. A client can never set it."""


Answered = Callable[[Question, engine_pb2.RequestRecord], None]
"""Told what became of a question."""


@dataclass(frozen=True, slots=True)
class Account:
    """What an answer took. usage: None if the engine did not say."""

    usage: Usage | None
    timing: Timing
    cache: CacheUse


class Answer:
    """An answer whose first token has come. started: on the clock of time.perf_counter.

    on_record: told the engine's record of it.
    """

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        started: float,
        first_token_s: float,
        retrieved: Retrieved,
        tokenize_s: float,
        passages: Sequence[Passage],
        completion: Completion,
        engine: Engine,
        metrics: Metrics,
        on_record: Sequence[Callable[[engine_pb2.RequestRecord], None]],
    ) -> None:
        self.id = request_id
        self.model = model
        self.created = int(time.time())
        self.citations: list[Citation] = citations(passages)
        self._started = started
        self._first_token_s = first_token_s
        self._retrieved = retrieved
        self._tokenize_s = tokenize_s
        self._completion = completion
        self._engine = engine
        self._metrics = metrics
        self._on_record = on_record

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces of the answer as they come. Raises Unavailable."""
        async with aclosing(self._completion.pieces()) as pieces:
            try:
                async for piece in pieces:
                    yield piece
            except Unavailable as error:
                self._engine.note_failure(error)
                self._metrics.upstream_failures.labels(PART).inc()
                self._completion.span.fail(f"{type(error).__name__}: {error.part}")
                note_refusal(error)
                raise

    async def account(self) -> Account:
        """What the answer took; for after the last piece. Never raises."""
        total_s = time.perf_counter() - self._started
        try:
            record = await self._engine.request_record(self.id)
        except RagCacheError as error:
            log.info("no record of %s: %s", self.id, error)
            if isinstance(error, Unavailable):
                self._metrics.upstream_failures.labels("engine records").inc()
            record = None
        if record is not None:
            for tell in self._on_record:
                tell(record)
        timing = self._timing(total_s, record)
        account = Account(self._completion.usage, timing, cache_use(record))
        self._metrics.observe(account.timing, account.cache)
        _note_account(account)
        return account

    async def whole(self) -> ChatCompletion:
        """The answer in one piece. Raises Unavailable."""
        text = []
        finish_reason = ""
        async for piece in self.pieces():
            text.append(piece.text)
            finish_reason = piece.finish_reason or finish_reason
        account = await self.account()
        message = AnswerMessage(content="".join(text))
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[Choice(message=message, finish_reason=finish_reason)],
            usage=account.usage,
            ragcache=RagCacheAnswer(
                citations=self.citations, timing_ms=account.timing, cache=account.cache
            ),
        )

    def _timing(self, total_s: float, record: engine_pb2.RequestRecord | None) -> Timing:
        return Timing(
            retrieve=to_ms(self._retrieved.retrieve_s),
            stages=self._retrieved.stages,
            embed=to_ms(self._retrieved.embed_s),
            search=to_ms(self._retrieved.search_s),
            tokenize=to_ms(self._tokenize_s),
            queue=to_ms(record.queue_s) if record else None,
            load=to_ms(record.load_s) if record else None,
            repair=to_ms(record.recompute_s) if record else None,
            prefill=to_ms(record.prefill_s) if record else None,
            first_token=to_ms(self._first_token_s),
            total=to_ms(total_s),
        )


class Answerer:
    """Answers questions.

    tokenizing: one thread, because the prompt builder takes no more. reuse: for requests that do
    not ask for another. trials: hold what is blended to a quality; None: nothing does. answered:
    told of every question that may reuse stored KV.
    """

    def __init__(
        self,
        *,
        model: str,
        space: KVSpace,
        reuse: Reuse,
        prompts: PromptBuilder,
        tokenizing: Executor,
        retriever: RetrieverClient,
        engines: Engines,
        trials: QualityTrials | None,
        metrics: Metrics,
        tracer: Tracer,
        plan_keys: SigningKeys | None,
        answered: Answered | None,
    ) -> None:
        self._model = model
        self._space = space
        self._reuse = reuse
        self._prompts = prompts
        self._tokenizing = tokenizing
        self._retriever = retriever
        self._engines = engines
        self._trials = trials
        self._plan_keys = plan_keys
        self._metrics = metrics
        self._tracer = tracer
        self._answered = answered

    async def start(self, request: ChatRequest, stack: AsyncExitStack) -> Answer:
        """Work up to the first token. Leaving the stack stops what still runs.

        Raises InvalidInput, NotFound or Unavailable.
        """
        started = time.perf_counter()
        if request.model not in (None, self._model):
            raise NotFound("model", str(request.model), f"ask for {self._model!r}")
        conversation = read_conversation(request.messages)
        options = request.ragcache
        reuse = wanted_reuse(options, self._reuse)
        if self._trials is not None:
            reuse = self._trials.settle(reuse)
        try:
            with self._tracer.start_child("retrieve") as span, span.current():
                retrieved = await retrieve(
                    self._retriever, options.collection, conversation.question, options.top_k
                )
                span.set(stages=retrieved.stages, hits=len(retrieved.hits))
        except RagCacheError as error:
            raise in_rest_terms(error, _field_names(request)) from error

        before = time.perf_counter()
        with self._tracer.start_child("tokenize") as span:
            prompt = await asyncio.get_running_loop().run_in_executor(
                self._tokenizing,
                self._prompts.build,
                conversation,
                retrieved.hits,
                request.answer_tokens(),
            )
            request_id = f"chatcmpl-{uuid.uuid4().hex}"
            documents = [
                document_name(options.collection, passage.chunk.document_id)
                for passage in prompt.passages
            ]
            body = completion_body(
                request,
                model=self._model,
                token_ids=prompt.prompt.token_ids,
                max_tokens=prompt.max_tokens,
                plan=plan_reuse(
                    reuse,
                    prompt.prompt,
                    self._space,
                    DOMAIN,
                    request_id,
                    documents,
                    retrieved.asked_at_ms,
                ),
                plan_keys=self._plan_keys,
                # Nothing else has this salt, so the engine's own prefix cache cannot hit either.
                cache_salt=request_id if reuse.mode == "off" else None,
            )
            size = {
                "chunks": len(prompt.passages),
                "prompt_tokens": len(prompt.prompt.token_ids),
            }
            span.set(**size)
        current_span().set(answer=request_id, reuse=reuse.mode, **size)
        tokenize_s = time.perf_counter() - before

        on_record: list[Callable[[engine_pb2.RequestRecord], None]] = []
        if self._trials is not None:
            asked = AskedQuestion(prompt.prompt, tuple(documents), retrieved.asked_at_ms)
            on_record.append(partial(self._trials.offer, asked, reuse))
        if self._answered is not None and reuse.mode != "off":
            texts = [passage.chunk.text for passage in prompt.passages]
            question = Question(reuse.mode, prompt.prompt, texts, documents, retrieved.asked_at_ms)
            on_record.append(partial(self._answered, question))

        engine, completion = await self._engines.complete(body, stack)
        first_token_s = time.perf_counter() - started
        self._metrics.first_token.observe(first_token_s)
        return Answer(
            request_id=request_id,
            model=self._model,
            started=started,
            first_token_s=first_token_s,
            retrieved=retrieved,
            tokenize_s=tokenize_s,
            passages=prompt.passages,
            completion=completion,
            engine=engine,
            metrics=self._metrics,
            on_record=on_record,
        )


def cache_use(record: engine_pb2.RequestRecord | None) -> CacheUse:
    """The engine's account of a prompt's KV; all null without one."""
    if record is None:
        return CacheUse()
    return CacheUse(
        prompt_tokens=record.prompt_tokens,
        local_tokens=record.local_tokens,
        loaded_tokens=record.loaded_tokens,
        loaded_bytes=record.loaded_bytes,
        blended_tokens=record.blended_tokens,
        recomputed_tokens=record.recomputed_tokens,
        miss=record.miss,
    )


def _note_account(account: Account) -> None:
    """Say on the request's span where its KV came from, as far as that is known."""
    span = current_span()
    if not span.is_recording:
        return
    cache, usage = account.cache, account.usage
    known = cache.model_dump(exclude={"prompt_tokens"}, exclude_none=True)
    span.set(**known, **({"completion_tokens": usage.completion_tokens} if usage else {}))


def to_ms(seconds: float) -> float:
    """Milliseconds to the microsecond."""
    return round(1e3 * seconds, 3)


def _field_names(request: ChatRequest) -> dict[str, str]:
    return {
        "query": f"messages[{len(request.messages) - 1}].content",
        "collection": "ragcache.collection",
        "top_k": "ragcache.top_k",
    }
