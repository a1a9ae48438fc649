"""An engine whose requests wait for each other, and gateways that share it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ragcache_core.errors import NotFound
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.planner.speculation import common_tokens
from ragcache_engine.telemetry.request_records import RequestRecord, RequestRecords
from ragcache_wire.v1 import engine_pb2, retriever_pb2
from tests.helpers.gateway_fakes import FakeEngine, FakeRecords, FakeRetriever, chunk


@dataclass
class _Waiting:
    """A request without a first token."""

    body: dict[str, Any]
    number: int
    arrived_s: float = field(default_factory=time.monotonic)
    computed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in the queue: vLLM schedules by priority, then by arrival."""
        return self.body.get("priority", 0), self.number

    @property
    def is_guess(self) -> bool:
        return self.body.get("max_tokens") == 1


class QueueingEngine(FakeEngine):
    """Computes one prompt after the other, and keeps its prefixes. It answers streams only.

    Args:
        token_s: Seconds to compute one token.

    Attributes:
        free: It begins no prompt until this is set. It is set at first.
    """

    def __init__(self, token_s: float) -> None:
        super().__init__()
        self.kept = RequestRecords()
        self.token_s = token_s
        self.free = asyncio.Event()
        self.free.set()
        self.num_guesses = 0
        self.num_guesses_before_questions = 0  # guesses that began while a question waited
        self._waiting: list[_Waiting] = []
        self._prompts: list[list[int]] = []
        self._numbers = itertools.count()
        self._has_come = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Requests that are not being computed yet."""
        return len(self._waiting)

    async def run(self) -> None:
        """Compute what waits, until it is cancelled."""
        while True:
            while not (self._waiting and self.free.is_set()):
                self._has_come.clear()
                await self._has_come.wait()
                await self.free.wait()
            one = min(self._waiting, key=lambda waiting: waiting.rank)
            self._waiting.remove(one)
            if one.is_guess and any(not other.is_guess for other in self._waiting):
                self.num_guesses_before_questions += 1
            prompt = one.body["prompt"]
            cached = max((common_tokens(prompt, earlier) for earlier in self._prompts), default=0)
            record = RequestRecord(queue_s=time.monotonic() - one.arrived_s)
            record.prefill_s = self.token_s * (len(prompt) - cached)
            await asyncio.sleep(record.prefill_s)
            self._prompts.append(prompt)
            plan = ReusePlan.decode(one.body["kv_transfer_params"]["ragcache"])
            self.kept.put(plan.request, record)
            one.computed.set()

    async def _reaches_first_word(self, body: Any, event: Any, receive: Any, send: Any) -> bool:
        one = _Waiting(body, next(self._numbers))
        self.num_guesses += one.is_guess
        self._waiting.append(one)
        self._has_come.set()
        try:
            return await self._prefilled(one.computed, receive)
        finally:
            if one in self._waiting:
                self._waiting.remove(one)


class QueueRecords(FakeRecords):
    """The records of a queueing engine for one of its gateways, with what its prefills cost."""

    def __init__(self, engine: QueueingEngine) -> None:
        super().__init__()
        self._engine = engine
        self.pass_tokens, self.token_s = 64, engine.token_s

    async def GetRequestRecord(self, request: Any, context: Any) -> Any:  # noqa: N802
        record = self._engine.kept.get(request.request)
        if record is None:
            raise NotFound("record", request.request, "ask sooner")
        return engine_pb2.RequestRecord(
            request=request.request, queue_s=record.queue_s, prefill_s=record.prefill_s
        )

    async def GetCosts(self, request: Any, context: Any) -> Any:  # noqa: N802
        costs = await super().GetCosts(request, context)
        costs.queue_s = self._engine.kept.queue_s()
        return costs


class DistinctDocuments(FakeRetriever):
    """Finds another document for each question, which its first stage has already.

    Args:
        search_s: Time of a search; the first stage comes after half of it.
        final_probability: Of the first stage.
    """

    def __init__(self, search_s: float, final_probability: float) -> None:
        super().__init__()
        self.search_s = search_s
        self.final_probability = final_probability

    async def Search(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        text = " ".join(f"Line {number} is about {request.query}" for number in range(12))
        hits = [retriever_pb2.Hit(chunk=chunk(request.query, 0, text), score=0.9)]
        yield retriever_pb2.SearchStage(
            hits=hits,
            progress=0.5,
            search_us=round(5e5 * self.search_s),
            final_probability=self.final_probability,
        )
        await asyncio.sleep(self.search_s / 2)
        if self.hold is not None:
            await self.hold.wait()
        yield retriever_pb2.SearchStage(hits=hits, final=True, progress=1)
