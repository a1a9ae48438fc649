"""Chunks computed before anybody asks for them, so that even the first visitor finds their KV.

They come from written documents, and from questions that had to compute them again and again
(``core/precompute_queue`` says which is worth most). Each is computed right behind the template,
one at a time, while no engine answers a question of this gateway.

What other gateways ask is not known here. For their sake a prefill has the lowest priority, which
counts where vLLM schedules by priority, and is cut: vLLM schedules what runs before what waits, so
that a long prefill would take every step's tokens until it ends. Each piece asks for the prompt up
to some point, half of one step beyond what the piece before left in vLLM's own prefix cache. So a
question that comes meanwhile has a part of the next step, and the first place in the one after it.
Where vLLM's cache did not keep the piece before, the next one computes it again, uncut; so a chunk
whose piece took more than a step is given up.
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
from dataclasses import dataclass
from typing import Literal

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import Prompt, assemble, plan_blend, plan_exact
from ragcache_core.plan.reuse_plan import ReusePlan, document_name
from ragcache_core.plan.segments import checked_segments, longest_exact_chain
from ragcache_core.scheduling.precompute_queue import PrecomputeQueue, Prefill, QueuedPrefill
from ragcache_core.store_api import LookupKey
from ragcache_gateway.background.idle import LOWEST_PRIORITY, IdleTime
from ragcache_gateway.background.demand import Question, asks
from ragcache_gateway.prompts.builder import Frame, PromptBuilder
from ragcache_gateway.engines.client import Engine, is_lost
from ragcache_gateway.engines.completion import transfer_params
from ragcache_gateway.engines.pool import Engines
from ragcache_gateway.status.metrics import Metrics
from ragcache_kv.store_client.sharded import AsyncShardedStore
from ragcache_wire.v1 import engine_pb2
from ragcache_wire.watched.signing_keys import SigningKeys

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20
"""Text that waits at most; what does not fit is computed by its first visitor."""

HALF_LIFE_S = 3600.0
"""After which a retrieval counts half: idle times come once a day, and what is asked changes."""

STEP_SHARE = 2
"""A piece takes one part in so many of a step's tokens."""

UNKNOWN_STEP_TOKENS = 512
"""Taken for a step's where an engine does not say: few engines have fewer (vLLM's own default is
2,048 or more), and the price of more pieces is a request for each."""

RETRY_S = 5.0
"""After several failures at a stretch; after one it is FIRST_RETRY_S."""

FIRST_RETRY_S = 0.1

MAX_LOST = 2
"""Times that an engine may be lost over one prefill: the third could be lost to it, too."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is computed, and for whom.

    max_model_len: of a prompt and its answer, in tokens. template: around every prompt's chunks.
    reuse: what questions do that do not say.
    """

    model: str
    max_model_len: int
    space: KVSpace
    domain: str
    template: Frame
    reuse: Literal["exact", "blend"]


class _Forgotten(Exception):
    """A document of a prefill was deleted meanwhile."""


class Precompute:
    """The queue, and the task that works on it. For one event loop."""

    def __init__(
        self,
        target: Target,
        *,
        prompts: PromptBuilder,
        tokenizing: Executor,
        engines: Engines,
        idle: IdleTime,
        store: AsyncShardedStore,
        metrics: Metrics,
        plan_keys: SigningKeys | None,
    ) -> None:
        self._target = target
        self._prompts = prompts
        self._tokenizing = tokenizing
        self._engines = engines
        self._idle = idle
        self._store = store
        self._metrics = metrics
        self._plan_keys = plan_keys
        self._queue = PrecomputeQueue(most_bytes=MAX_WAITING_BYTES, half_life_s=HALF_LIFE_S)
        self._lost: Counter[bytes] = Counter()  # engines, by what they were lost over
        self._failures = 0  # at a stretch
        self._came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Compute what comes from now on."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Forget what waits."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def write(
        self, collection: str, document: str, chunk_texts: Sequence[str], written_at_ms: int
    ) -> None:
        """A document has these chunks now, in place of those it had.

        Under ``exact`` none is computed for that: it would serve the prompts that begin with it,
        and before questions have come nobody knows which chunk of how many that is.
        """
        name = document_name(collection, document)
        self._queue.forget_document(name, written_at_ms - 1)
        if self._target.reuse == "blend":
            for text in chunk_texts:
                self._drop(self._queue.add_written(Prefill((text,), (name,), written_at_ms)))
        self._note()

    def forget(self, collection: str, document: str) -> None:
        """A document is gone."""
        self._queue.forget_document(document_name(collection, document), _now_ms())
        self._note()

    def answered(self, question: Question, record: engine_pb2.RequestRecord) -> None:
        """A question was answered, as the engine's record says."""
        now = time.monotonic()
        for ask in asks(question, record, self._target.template.head):
            self._drop(
                self._queue.record_question(ask.prefill, now, num_tokens=ask.num_tokens, saved_s=ask.saved_s)
            )
        self._note()

    def _drop(self, dropped: Sequence[QueuedPrefill]) -> None:
        for one in dropped:
            self._metrics.precomputed.labels("dropped", one.source).inc()

    def _note(self) -> None:
        self._metrics.precompute_waiting.set(len(self._queue))
        if len(self._queue):
            self._came.set()
        else:
            self._came.clear()
            self._lost.clear()

    async def _run(self) -> None:
        while True:
            await self._came.wait()
            async with self._idle.turn():  # what is worth most then, not now
                one = self._queue.advance_to_first(_now_ms())
            if one is None:  # its document was deleted meanwhile
                self._note()
                continue
            try:
                outcome = await self._compute(one.prefill)
            except _Forgotten:
                self._note()
                continue
            except InvalidInput as error:
                log.warning("%s is not precomputed: %s", _what(one.prefill), error)
                outcome = "refused"
            except RagCacheError as error:
                log.info("precomputing %s waits: %s", _what(one.prefill), error)
                if not self._is_given_up(one.prefill, error):
                    self._queue.postpone(one.prefill)
                    await self._pause()
                    continue
                outcome = "failed"
            except Exception:
                # One prefill is not worth the rest of them.
                log.exception("%s is not precomputed", _what(one.prefill))
                outcome = "failed"
            self._failures = 0
            del self._lost[one.prefill.name]
            self._queue.mark_done(one.prefill)
            self._metrics.precomputed.labels(outcome, one.source).inc()
            self._note()

    def _is_given_up(self, prefill: Prefill, error: RagCacheError) -> bool:
        """Whether it is left to its first visitor, as it may be what engines are lost over."""
        if is_lost(error):
            self._lost[prefill.name] += 1
        return self._lost[prefill.name] >= MAX_LOST

    async def _pause(self) -> None:
        """Before the next one is tried: longer where none can be computed."""
        self._failures += 1
        await asyncio.sleep(min(RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._failures - 1, 30)))

    async def _compute(self, prefill: Prefill) -> str:
        """Have it computed unless it is stored. Raises Unavailable, InvalidInput, _Forgotten."""
        loop = asyncio.get_running_loop()
        chunks = await loop.run_in_executor(self._tokenizing, self._encode, prefill.texts)
        template = self._target.template
        prompt = assemble(template.head, chunks, template.tail)
        if len(prompt.token_ids) >= self._target.max_model_len:
            # Else all of its pieces that fit would be computed for nothing.
            raise InvalidInput("chunk", "is longer than the model's context", "cut it smaller")
        if await self._is_stored(prefill, prompt):
            return "stored"
        engine = self._engines.choose()
        step_tokens = await _step_tokens(engine)
        for piece in pieces(prompt, step_tokens // STEP_SHARE):
            plan = self._plan(prefill, piece)
            async with self._idle.turn(), AsyncExitStack() as stack:
                if self._queue.is_deleted(prefill):
                    raise _Forgotten
                body = {
                    "model": self._target.model,
                    "prompt": list(piece.token_ids),
                    "max_tokens": 1,
                    "temperature": 0.0,
                    "stream": True,
                    "priority": LOWEST_PRIORITY,
                    "kv_transfer_params": transfer_params(plan, piece.token_ids, self._plan_keys),
                }
                completion = await self._engines.complete_on(engine, body, stack)
                async for _ in completion.pieces():
                    pass
            if piece is not prompt and await _computed_tokens(engine, plan.request) > step_tokens:
                log.info("%s does not keep %s", engine.address, _what(prefill))
                return "evicted"
        return "computed"

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._prompts.encode_chunk(text) for text in texts]

    def _plan(self, prefill: Prefill, prompt: Prompt) -> ReusePlan:
        request = f"precompute-{uuid.uuid4().hex}"
        space, domain = self._target.space, self._target.domain
        documents = prefill.documents[: len(prompt.chunk_ends)]
        if prefill.mode == "blend":
            # Its engine then sees what the template did to it, which a blend wants to know.
            at_ms = prefill.planned_at_ms
            return plan_blend(prompt, space, domain, request, 0.0, documents, at_ms)
        return plan_exact(prompt, space, domain, request, documents, prefill.planned_at_ms)

    async def _is_stored(self, prefill: Prefill, prompt: Prompt) -> bool:
        """Whether questions find it. Raises Unavailable: then it could not be stored either."""
        plan = self._plan(prefill, prompt)
        segments = checked_segments(plan, prompt.token_ids, self._target.space)
        if prefill.mode == "blend":
            [found] = await self._store.lookup([LookupKey(segments[-1].segment.chunk)])
            return bool(found.held)
        answers = await self._store.lookup([LookupKey.of(named.variant) for named in segments])
        infos = {held.key: held.info for answer in answers for held in answer.held}
        return len(longest_exact_chain(segments, infos)) == len(segments)


def pieces(prompt: Prompt, most_tokens: int) -> list[Prompt]:
    """A prompt's beginnings, each with most_tokens more; it is the last one itself.

    The first one has so many behind the template, which is at hand as a rule and else no more than
    they are. A longer template is cut like the rest, and no segment before it is whole.
    """
    first = prompt.head if prompt.head <= most_tokens else 0
    ends = range(first + most_tokens, len(prompt.token_ids), most_tokens)
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


def _what(prefill: Prefill) -> str:
    """A prefill, for a log."""
    return f"KV of {', '.join(sorted(set(prefill.documents)))} (chunks: {len(prefill.texts)})"


async def _step_tokens(engine: Engine) -> int:
    """Tokens that it computes in one step at most."""
    with contextlib.suppress(RagCacheError):
        costs = await engine.costs()
        return costs.prefill.pass_tokens or UNKNOWN_STEP_TOKENS
    return UNKNOWN_STEP_TOKENS


async def _computed_tokens(engine: Engine, request: str) -> int:
    """Tokens of a prompt that it computed; 0 if it does not say."""
    with contextlib.suppress(RagCacheError):
        record = await engine.request_record(request)
        return record.prompt_tokens - record.local_tokens - record.loaded_tokens
    return 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
