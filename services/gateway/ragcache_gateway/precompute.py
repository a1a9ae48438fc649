"""Chunks computed before anybody asks for them, so that even the first visitor finds their KV.

Each is computed by itself right behind the template, as it would stand first in a prompt; behind
other chunks it is of use where prompts are blended. Only while no engine answers a question of this
gateway, one at a time: one that comes meanwhile waits for one chunk's prefill at most. What other
gateways ask is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass

from ragcache_core.errors import InvalidInput, RagCacheError
from ragcache_core.keys import KVSpace
from ragcache_core.plan import document_name
from ragcache_core.prompt import assemble, plan_blend
from ragcache_gateway.completion import transfer_params
from ragcache_gateway.engines import Engines
from ragcache_gateway.idle import IdleTime
from ragcache_gateway.metrics import Metrics
from ragcache_gateway.prompt import Frame, PromptBuilder
from ragcache_wire.plan_keys import PlanKeys

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20
"""Text that waits at most; what does not fit is computed by its first visitor."""

RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """written_at_ms: Unix time before the document was written; a delete since then goes first."""

    text: str
    document: str
    written_at_ms: int


class Precompute:
    """A queue of chunks, and the task that has them computed. For one event loop.

    frame: the template around every prompt's chunks.
    """

    def __init__(
        self,
        *,
        model: str,
        space: KVSpace,
        domain: str,
        frame: Frame,
        prompts: PromptBuilder,
        tokenizing: Executor,
        engines: Engines,
        idle: IdleTime,
        metrics: Metrics,
        plan_keys: PlanKeys | None,
    ) -> None:
        self._model = model
        self._space = space
        self._domain = domain
        self._frame = frame
        self._prompts = prompts
        self._tokenizing = tokenizing
        self._engines = engines
        self._idle = idle
        self._plan_keys = plan_keys
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
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

    def add(
        self, collection: str, document: str, chunk_texts: Sequence[str], written_at_ms: int
    ) -> None:
        """Have a document's chunks computed some time."""
        name = document_name(collection, document)
        for text in chunk_texts:
            size = len(text.encode())
            if self._waiting_bytes + size > MAX_WAITING_BYTES:
                self._metrics.precomputed.labels("dropped").inc()
                continue
            self._waiting.append(_Waiting(text, name, written_at_ms))
            self._waiting_bytes += size
        self._note()

    def _note(self) -> None:
        self._metrics.precompute_waiting.set(len(self._waiting))
        if self._waiting:
            self._came.set()
        else:
            self._came.clear()

    async def _run(self) -> None:
        while True:
            await self._came.wait()
            one = self._waiting[0]
            try:
                await self._compute(one)
            except InvalidInput as error:
                log.warning("a chunk of %s is not precomputed: %s", one.document, error)
                self._done(one, "refused")
            except RagCacheError as error:
                log.info("precomputing waits: %s", error)
                await asyncio.sleep(RETRY_S)
            except Exception:
                # One chunk is not worth the rest of them.
                log.exception("a chunk of %s is not precomputed", one.document)
                self._done(one, "failed")
            else:
                self._done(one, "computed")

    def _done(self, one: _Waiting, outcome: str) -> None:
        self._waiting.popleft()
        self._waiting_bytes -= len(one.text.encode())
        self._metrics.precomputed.labels(outcome).inc()
        self._note()

    async def _compute(self, one: _Waiting) -> None:
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(self._tokenizing, self._prompts.encode_chunk, one.text)
        prompt = assemble(self._frame.head, [ids], self._frame.tail)
        plan = plan_blend(
            prompt,
            self._space,
            self._domain,
            f"precompute-{uuid.uuid4().hex}",
            0.0,
            [one.document],
            one.written_at_ms,
        )
        body = {
            "model": self._model,
            "prompt": list(prompt.token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": True,
            "kv_transfer_params": transfer_params(plan, prompt.token_ids, self._plan_keys),
        }
        async with self._idle.turn(), AsyncExitStack() as stack:
            _, completion = await self._engines.complete(body, stack)
            async for _ in completion.pieces():
                pass
