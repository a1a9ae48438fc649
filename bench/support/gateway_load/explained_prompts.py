"""Times what counting and explaining an answer cost the gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from ragcache_core.plan.prompt import assemble
from ragcache_core.planner.request_plan import (
    ChunkAction,
    ChunkDecision,
    PlanAlternative,
    PlanReason,
    PlanSeconds,
    RequestPlan,
)
from ragcache_gateway.chat.accounting import observe_chunks
from ragcache_gateway.explain.explanation import (
    AnsweredPrompt,
    explain,
    explain_plan,
    prompt_parts,
)
from ragcache_gateway.prompts.passages import Passage
from ragcache_gateway.status.metrics import Metrics
from ragcache_wire.v1 import engine_pb2, retriever_pb2

CHUNK_TOKENS: Final = 250
HEAD_TOKENS: Final = 64
ROUNDS: Final = 20


def counting_us(num_chunks: int, num_answers: int) -> float:
    """Return the time per answer in which its chunks are kept and counted, in microseconds.

    Every other chunk is loaded, and the others are misses.
    """
    metrics = Metrics("tiny")
    answer = _Answer(num_chunks)
    return _least_us(lambda: observe_chunks(answer.answered(), metrics), num_answers)


def explanation_us(num_chunks: int, num_answers: int) -> float:
    """Return the time of one explanation, which a client asks for, in microseconds."""
    answered = _Answer(num_chunks).answered()
    return _least_us(lambda: explain(answered), num_answers)


def _least_us(call: Callable[[], object], count: int) -> float:
    """Return the least mean time of some rounds: other processes only add to it."""
    means_s = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for _ in range(max(1, count // ROUNDS)):
            call()
        means_s.append((time.perf_counter() - began_s) / max(1, count // ROUNDS))
    return round(1e6 * min(means_s), 1)


class _Answer:
    """What the gateway knows of an answer when it has ended."""

    def __init__(self, num_chunks: int) -> None:
        head_end, question = range(HEAD_TOKENS), range(30)
        chunks = [range(CHUNK_TOKENS)] * num_chunks
        self._prompt = assemble(head_end, chunks, question, stable_head=HEAD_TOKENS)
        self._passages = [
            Passage(
                retriever_pb2.Chunk(id=f"doc-{n}#0", document_id=f"doc-{n}", title=f"Document {n}"),
                rank=n,
                score=1 - n / num_chunks,
            )
            for n in range(num_chunks)
        ]
        order = tuple(range(num_chunks))
        seconds = PlanSeconds(0.0, 0.01, 0.0, 0.04)
        other = PlanAlternative("engine:10.0.0.2:8000", order, "exact", seconds)
        decisions = tuple(_decisions(num_chunks))
        self._plan = RequestPlan(order, "engine:10.0.0.1:8000", decisions, seconds, other)
        self._record = engine_pb2.RequestRecord(
            queue_s=0.001,
            load_s=0.01,
            prefill_s=0.04,
            prompt_tokens=len(self._prompt.token_ids),
            local_tokens=HEAD_TOKENS,
            miss="never stored",
            segments=_segments(num_chunks),
        )

    def answered(self) -> AnsweredPrompt:
        """Return what is kept of the answer."""
        return AnsweredPrompt(
            id="chatcmpl-1",
            created=1,
            model="tiny",
            engine="10.0.0.1:8000",
            tenant=None,
            mode="exact",
            parts=prompt_parts(self._prompt, self._passages, self._plan),
            plan=explain_plan(self._plan),
            record=self._record,
        )


def _decisions(num_chunks: int) -> Iterable[ChunkDecision]:
    key = bytes(16)
    yield ChunkDecision(key, HEAD_TOKENS, ChunkAction.CACHED, PlanReason.RESIDENT, "device")
    for n in range(num_chunks):
        if n % 2 == 0:
            yield ChunkDecision(key, CHUNK_TOKENS, ChunkAction.LOAD, PlanReason.STORED, "memory")
        else:
            yield ChunkDecision(key, CHUNK_TOKENS, ChunkAction.COMPUTE, PlanReason.NOT_STORED)


def _segments(num_chunks: int) -> Iterable[engine_pb2.SegmentRecord]:
    yield engine_pb2.SegmentRecord(start=0, end=HEAD_TOKENS, cached_tokens=HEAD_TOKENS)
    for n in range(num_chunks):
        start = HEAD_TOKENS + n * CHUNK_TOKENS
        segment = engine_pb2.SegmentRecord(start=start, end=start + CHUNK_TOKENS)
        if n % 2 == 0:
            segment.loaded_tokens = CHUNK_TOKENS
            segment.source.MergeFrom(
                engine_pb2.LoadSource(tier="memory", num_bytes=1 << 20, base_position=start)
            )
        else:
            segment.reason = "never stored"
        yield segment
