"""Mend loads that are not exact, in slices between the engine's own passes (Cache-Craft §3.2).

What was loaded lies in the request's blocks. First the question looks at it; by that and by what
is known of the chunks, tokens are chosen and computed anew, in ascending order, together with
whatever did not come. Then vLLM takes the request up as if all of it had been loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ragcache_core.blend.focused_chunks import focused_chunks
from ragcache_core.blend.slices import merge_runs, split_first_pass
from ragcache_core.blend.token_ranking import rank_tokens
from ragcache_core.blend.token_selection import select_tokens
from ragcache_engine.blend.prompt_slice import PromptSlice
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import LoadJob, LoadOutcome, RecomputeJob
from ragcache_wire.trace_context import metadata
from ragcache_wire.tracing import Kind, Span, Tracer

if TYPE_CHECKING:
    from ragcache_engine.blend.attention import AttentionObserver
    from ragcache_engine.blend.recomputer import Recomputer

log = logging.getLogger("vllm.ragcache")

RECOMPUTE_FAILED = "recompute failed"


@dataclass(slots=True)
class _Mending:
    """runs: what is left to compute; None before it has been chosen."""

    job: LoadJob
    recompute: RecomputeJob
    outcome: LoadOutcome
    began: float
    trace: Span
    runs: tuple[range, ...] | None = None
    repaired: int = 0
    cancelled: bool = False


_FAILED = "KV of request %s could not be mended"


class RecomputationQueue:
    """Mends loads in their order, several in one pass. For the worker's main thread only.

    slice_tokens: computed in one step at most while other requests run, so that these go on
    decoding; where none does, a step takes a whole pass. run_tokens: of what is chosen, so many
    follow each other at least (``select_tokens``). question_tokens: that look, at most. focus_window: of
    Algorithm 1, by which only chunks that the question looks at are mended; 0: all are. tracer: of
    repairs that are part of a trace.
    """

    def __init__(
        self,
        cache: PagedCache,
        recomputer: Recomputer,
        observer: AttentionObserver,
        slice_tokens: int,
        run_tokens: int,
        question_tokens: int,
        tracer: Tracer | None = None,
        *,
        focus_window: int = 0,
    ) -> None:
        self._cache = cache
        self._recomputer = recomputer
        self._observer = observer
        self._slice_tokens = min(slice_tokens, recomputer.max_tokens)
        self._run_tokens = run_tokens
        self._question_tokens = question_tokens
        self._focus_window = focus_window
        self._tracer = tracer or Tracer()
        self._mendings: list[_Mending] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to mend."""
        return not self._mendings

    def start(self, job: LoadJob, outcome: LoadOutcome) -> None:
        """Take up a load that has been written as far as it came."""
        recompute = job.recompute
        assert recompute is not None
        trace = self._tracer.below("recompute", metadata(job.traceparent), Kind.INTERNAL)
        trace.set(chunks=len(recompute.chunks), budget=recompute.budget)
        self._mendings.append(_Mending(job, recompute, outcome, time.monotonic(), trace))

    def cancel(self, request_id: str) -> None:
        """Stop mending a load; it is still reported."""
        for mending in self._mendings:
            if mending.job.request_id == request_id:
                mending.cancelled = True

    def advance(self, *, busy: bool) -> list[tuple[LoadJob, LoadOutcome]]:
        """Go on for one step; returns the loads that are mended, or failed to be.

        busy: other requests run in this step. One that fails takes no other along. What of a pass
        the first load leaves is the next one's, so that loads which come together share passes.
        """
        room = self._slice_tokens if busy else self._recomputer.max_tokens
        ended = [self._end(one, "cancelled") for one in self._mendings if one.cancelled]
        while self._mendings and room > 0:
            taken = []
            runs = self._recomputer.max_runs
            for mending in list(self._mendings):
                if room <= 0 or not runs:
                    break
                try:
                    if mending.runs is None:
                        room -= self._choose(mending)
                    if mending.runs and room > 0:
                        now, mending.runs = split_first_pass(
                            mending.runs, max_tokens=room, max_runs=runs
                        )
                        taken.append((mending, now))
                        room -= sum(map(len, now))
                        runs -= len(now)
                except Exception:
                    log.exception(_FAILED, mending.job.request_id)
                    ended.append(self._end(mending, RECOMPUTE_FAILED))
            ended += [self._end(one, RECOMPUTE_FAILED) for one in self._recompute(taken)]
            ended += [self._end(one, "") for one in self._mendings if one.runs == ()]
        return ended

    def _recompute(self, taken: Sequence[tuple[_Mending, Sequence[range]]]) -> list[_Mending]:
        """Compute runs of several loads in one pass; returns those for which that fails."""
        parts = [PromptSlice(m.recompute.token_ids, m.job.blocks, runs) for m, runs in taken]
        if not parts:
            return []
        try:
            self._recomputer.recompute_slices(parts)
        except Exception:
            if len(parts) == 1:
                [(mending, _)] = taken
                log.exception(_FAILED, mending.job.request_id)
                return [mending]
            # One that cannot be computed takes no other along.
            return [mending for one in taken for mending in self._recompute([one])]
        for mending, runs in taken:
            mending.repaired += sum(map(len, runs))
        return []

    def _end(self, mending: _Mending, reason: str) -> tuple[LoadJob, LoadOutcome]:
        self._mendings = [one for one in self._mendings if one is not mending]
        outcome = _outcome(mending, reason)
        mending.trace.set(blended=outcome.blended, repaired=mending.repaired, miss=reason)
        mending.trace.end()
        return mending.job, outcome

    def _choose(self, mending: _Mending) -> int:
        """Find what to compute; returns how many tokens looked for that."""
        recompute, job = mending.recompute, mending.job
        holes = merge_runs([*recompute.holes, *mending.outcome.lost])
        self._blank(job, holes)
        question = self._question(job, recompute)
        question_attention, let_go = self._look(job, recompute, question)
        order = rank_tokens(recompute.chunks, question_attention)
        # Holes are computed whatever is chosen, so they take nothing of the budget.
        chosen = select_tokens(
            order,
            recompute.budget,
            run_tokens=self._run_tokens,
            exact_head=job.first,
            done=holes,
        )
        wanted = [range(p, p + 1) for p in chosen.positions() if not any(p in c for c in let_go)]
        mending.runs = merge_runs([*wanted, *holes])
        return len(question)

    def _question(self, job: LoadJob, recompute: RecomputeJob) -> Sequence[int]:
        """The tokens that look at the chunks: none where nothing comes of it, or without room."""
        if not (recompute.budget and recompute.chunks and recompute.scratch):
            return ()
        size = self._cache.shape.block_size
        room = (-(-job.end // size) + len(recompute.scratch)) * size - job.end
        room = min(room, self._question_tokens, self._recomputer.max_tokens)
        # Of more than there is room for, its last words: what stands before them is mostly history.
        return recompute.token_ids[job.end :][-room:]

    def _look(
        self, job: LoadJob, recompute: RecomputeJob, question: Sequence[int]
    ) -> tuple[list[float] | None, Sequence[range]]:
        """What the question looks at, by position, and chunks that are not worth mending.

        Without a question nothing is known of either.
        """
        if not question:
            return None, ()
        token_ids = [*recompute.token_ids[: job.end], *question]
        own = job.blocks[: -(-job.end // self._cache.shape.block_size)]
        blocks, asking = (*own, *recompute.scratch), range(job.end, len(token_ids))
        chunks = [chunk.positions for chunk in recompute.chunks]
        paid = self._observer.paid(blocks, asking, chunks) if self._focus_window else None
        question_attention: list[float] = self._observer.question_attention(
            token_ids, blocks, asking, paid
        ).tolist()
        if paid is None:
            return question_attention, ()
        focused = focused_chunks(paid.by_layer, self._focus_window)
        return question_attention, [
            chunk for place, chunk in enumerate(chunks) if place not in focused
        ]

    def _blank(self, job: LoadJob, holes: Sequence[range]) -> None:
        """Put zeros where nothing came: what lies there now may be anything, even no number."""
        shape = self._cache.shape
        for hole in holes:
            zeros = torch.zeros(
                (self._cache.num_layers, 2, len(hole), shape.num_kv_heads, shape.head_dim),
                dtype=shape.dtype,
            )
            self._cache.write(zeros, self._cache.slots(job.blocks, hole.start, hole.stop))


def _outcome(mending: _Mending, reason: str) -> LoadOutcome:
    """Of a load that has been mended, holes and all; of one that failed, what came of it."""
    job, spent_s = mending.job, time.monotonic() - mending.began
    if reason:
        return replace(mending.outcome, reason=reason, recompute_s=spent_s)
    return replace(
        mending.outcome,
        tokens=job.end - job.first,
        blended=job.end - max(job.first, mending.recompute.exact_end),
        repaired=mending.repaired,
        recompute_s=spent_s,
    )
