"""Select the tokens to recompute of loads that are not exact, and recompute what must come early.

The loaded KV is in the request's blocks. First the queue measures what the question attends to. By
that, and by the known influence on the chunks, it selects tokens, and adds the chunks that did not
arrive. Then vLLM resumes the request as if all of it had been loaded. The pass that computes the
rest of the prompt also computes the selected tokens (``JointPass``).

Tokens that this pass has no room for are recomputed before, in ascending order. So are those over
``slice_tokens`` while other requests decode, and all tokens where passes cannot be joined.

Source: Cache-Craft section 3.2.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ragcache_core.blend.token_selection import (
    merge_runs,
    rank_tokens,
    runs_outside,
    select_tokens,
    split_first_pass,
)
from ragcache_engine.kv_cache.host_memory import HostCopy
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import LoadJob, LoadOutcome, PromptSlice, RecomputeJob
from ragcache_wire.tracing import Span, SpanKind, Tracer, metadata

if TYPE_CHECKING:
    from ragcache_engine.blend.components import BlendComponents

log = logging.getLogger("vllm.ragcache")

RECOMPUTE_FAILED = "recompute failed"
"""Reason of a load's failure: the worker could not recompute its approximate chunks."""

_LOG_FAILED = "recomputation queue: recompute failed request=%s"


@dataclass(slots=True)
class _RecomputationTask:
    """One load in the queue.

    Attributes:
        runs: Positions left to recompute. None: not selected yet.
        selection_step: In which step of the queue the selection began.
        shifted_runs: Positions of the loaded chunks that are shifted.
        attention: How much the question attends to each position, once that was measured.
    """

    job: LoadJob
    recompute: RecomputeJob
    outcome: LoadOutcome
    started: float
    trace: Span
    runs: tuple[range, ...] | None = None
    shifted_runs: tuple[range, ...] = ()
    recomputed_tokens: int = 0
    select_s: float = 0.0
    cancelled: bool = False
    attention: HostCopy | None = None
    selection_began: float | None = None
    selection_step: int = 0

    @property
    def missing(self) -> tuple[range, ...]:
        """Positions whose values did not arrive or do not exist."""
        return merge_runs([*self.recompute.missing, *self.outcome.missing_ranges])

    @property
    def tokens_left(self) -> int:
        """Number of selected tokens that are not recomputed yet."""
        return sum(map(len, self.runs or ()))

    @property
    def loaded_chunks(self) -> tuple[range, ...]:
        """Ranges of the load that came from other prefixes, without what was exact before it."""
        first, end = self.job.first, self.job.end
        clipped = (
            range(max(first, chunk.start), min(end, chunk.positions.stop))
            for chunk in self.recompute.chunks
        )
        return tuple(sorted((one for one in clipped if one), key=lambda one: one.start))

    @property
    def tokens_after(self) -> int:
        """Number of tokens of the prompt after the load."""
        return len(self.recompute.token_ids) - self.job.end

    def result(self, reason: str) -> LoadOutcome:
        """Return the load's outcome. reason: why the recomputation failed, or ""."""
        job, spent_s = self.job, time.monotonic() - self.started
        if reason:
            return replace(self.outcome, reason=reason, recompute_s=spent_s)
        return replace(
            self.outcome,
            tokens=job.end - job.first,
            blended_tokens=job.end - max(job.first, self.recompute.exact_end),
            recomputed_tokens=self.recomputed_tokens + self.tokens_left,
            recompute_s=spent_s,
            select_s=self.select_s,
            left_to_recompute=self.runs or (),
            loaded_chunks=self.loaded_chunks if self.runs else (),
            shifted_runs=self.shifted_runs if self.runs else (),
        )


class RecomputationQueue:
    """Recomputes loads in their order, several in one pass.

    With several ranks, the queues of all ranks take the same passes in the same steps. A queue
    depends on loads, on ``busy`` and on attention, which are equal on all ranks, and on no clock.

    Only the worker's main thread may use it.

    Args:
        cache: The paged cache that holds the loaded KV.
        blend: Passes of the model, and what measures the attention of a question.
        slice_tokens: Tokens that one step recomputes at most while other requests run, so that
            these keep decoding. A step without other requests uses a whole pass.
        question_tokens: Tokens of the question whose attention is measured, at most.
        joins_passes: Whether vLLM's own pass can recompute the rest of a selection.
        tracer: Traces the loads that are part of a trace.
    """

    def __init__(
        self,
        cache: PagedCache,
        blend: BlendComponents,
        slice_tokens: int,
        question_tokens: int,
        tracer: Tracer | None = None,
        *,
        joins_passes: bool = False,
    ) -> None:
        self._cache = cache
        self._recomputer = blend.recomputer
        self._observer = blend.observer
        self._slice_tokens = min(slice_tokens, blend.recomputer.max_tokens)
        self._question_tokens = question_tokens
        self._tracer = tracer or Tracer()
        self._joins_passes = joins_passes
        self._tasks: list[_RecomputationTask] = []
        self._step = 0

    @property
    def idle(self) -> bool:
        """Whether the queue is empty."""
        return not self._tasks

    def start(self, job: LoadJob, outcome: LoadOutcome) -> None:
        """Add a load whose arrived values are in the request's blocks."""
        recompute = job.recompute
        assert recompute is not None
        trace = self._tracer.start_child_of(
            "recompute", metadata(job.traceparent), SpanKind.INTERNAL
        )
        trace.set(chunks=len(recompute.chunks), budget_tokens=recompute.recompute_tokens)
        self._tasks.append(_RecomputationTask(job, recompute, outcome, time.monotonic(), trace))

    def cancel(self, request_id: str) -> None:
        """Stop recomputing a load. ``advance`` still reports it."""
        for task in self._tasks:
            if task.job.request_id == request_id:
                task.cancelled = True

    def advance(self, *, busy: bool) -> list[tuple[LoadJob, LoadOutcome]]:
        """Recompute for one step, and return the loads that vLLM can resume, or that failed.

        A load that fails does not affect other loads. The next load uses what the first one leaves
        of a pass, so loads that arrive together share passes.

        Args:
            busy: Whether other requests run in this step.
        """
        self._step += 1
        room = self._slice_tokens if busy else self._recomputer.max_tokens
        ended = [self._end(task, "cancelled") for task in self._tasks if task.cancelled]
        while self._tasks and room > 0:
            room, taken, failed = self._fill_pass(room, busy=busy)
            failed += self._recompute(taken)
            ended += [self._end(task, RECOMPUTE_FAILED) for task in failed]
            ended += [self._end(task, "") for task in self._tasks if self._can_resume(task, busy)]
            if all(self._is_selecting(task) for task in self._tasks):
                break
        return ended

    def _is_selecting(self, task: _RecomputationTask) -> bool:
        """Tell whether the device still measures the question's attention.

        With several ranks the measurement counts as over in the next step, which waits for it.
        """
        if task.attention is None or task.runs is not None:
            return False
        if self._recomputer.ranks.num_ranks > 1:
            return task.selection_step == self._step
        return not task.attention.is_complete

    def _can_resume(self, task: _RecomputationTask, busy: bool) -> bool:
        """Tell whether vLLM's next pass of the request can recompute what is left."""
        if task.runs is None or not task.runs:
            return task.runs is not None
        if not self._joins_passes or len(task.runs) > self._recomputer.max_runs // 2:
            return False
        room = self._slice_tokens if busy else self._recomputer.max_tokens - task.tokens_after
        return task.tokens_left <= room

    def _fill_pass(
        self, room: int, *, busy: bool
    ) -> tuple[int, list[tuple[_RecomputationTask, Sequence[range]]], list[_RecomputationTask]]:
        """Take runs for one pass of at most room tokens from the tasks, in their order.

        Returns:
            The tokens left, the tasks with the runs that the pass computes, and the tasks for which
            no tokens could be selected.
        """
        taken: list[tuple[_RecomputationTask, Sequence[range]]] = []
        failed = []
        max_runs = self._recomputer.max_runs
        for task in self._tasks:
            if room <= 0 or not max_runs:
                break
            try:
                if task.selection_began is None:
                    room -= self._begin_selection(task)
                if task.runs is None and not self._is_selecting(task):
                    self._select(task)
                if task.runs and room > 0 and not self._can_resume(task, busy):
                    runs, task.runs = split_first_pass(
                        task.runs, max_tokens=room, max_runs=max_runs
                    )
                    taken.append((task, runs))
                    room -= sum(map(len, runs))
                    max_runs -= len(runs)
            except Exception:
                log.exception(_LOG_FAILED, task.job.request_id)
                failed.append(task)
        return room, taken, failed

    def _recompute(
        self, taken: Sequence[tuple[_RecomputationTask, Sequence[range]]]
    ) -> list[_RecomputationTask]:
        """Recompute runs of several loads in one pass; return the tasks that failed."""
        slices = [
            PromptSlice(t.recompute.token_ids, t.job.blocks, runs, t.loaded_chunks, t.shifted_runs)
            for t, runs in taken
        ]
        if not slices:
            return []
        try:
            self._recomputer.recompute_slices(slices)
        except Exception:
            if len(slices) == 1:
                [(task, _)] = taken
                log.exception(_LOG_FAILED, task.job.request_id)
                return [task]
            # One by one, so that a task that fails does not affect the others.
            return [task for one in taken for task in self._recompute([one])]
        for task, runs in taken:
            task.recomputed_tokens += sum(map(len, runs))
        return []

    def _end(self, task: _RecomputationTask, reason: str) -> tuple[LoadJob, LoadOutcome]:
        self._tasks = [one for one in self._tasks if one is not task]
        outcome = task.result(reason)
        task.trace.set(
            blended=outcome.blended_tokens, recomputed=outcome.recomputed_tokens, miss=reason
        )
        task.trace.end()
        return task.job, outcome

    def _begin_selection(self, task: _RecomputationTask) -> int:
        """Begin to measure a question's attention; return how many tokens that computes."""
        task.selection_began, task.selection_step = time.monotonic(), self._step
        self._write_zeros(task.job, task.missing)
        question = self._question(task.job, task.recompute)
        if question:
            task.attention = HostCopy(self._question_attention(task.job, task.recompute, question))
        return len(question)

    def _select(self, task: _RecomputationTask) -> None:
        """Select the positions to recompute, after the attention was measured."""
        recompute, job = task.recompute, task.job
        attention = None
        if task.attention is not None:
            if self._recomputer.ranks.num_ranks > 1:
                task.attention.wait()
            attention = task.attention.take().tolist()
        order = rank_tokens(recompute.chunks, attention)
        # Missing positions are recomputed in any case, so they do not count against the budget.
        selected = select_tokens(
            order,
            recompute.recompute_tokens,
            exact_head=job.first,
            already_selected=task.missing,
        )
        task.runs = merge_runs([*selected.runs, *task.missing])
        task.shifted_runs = runs_outside(task.loaded_chunks, task.runs)
        assert task.selection_began is not None
        task.select_s = time.monotonic() - task.selection_began

    def _question(self, job: LoadJob, recompute: RecomputeJob) -> Sequence[int]:
        """Return the question tokens whose attention decides the selection, maybe none."""
        if not (recompute.recompute_tokens and recompute.chunks and recompute.scratch_blocks):
            return ()
        size = self._cache.shape.block_size
        room = (-(-job.end // size) + len(recompute.scratch_blocks)) * size - job.end
        room = min(room, self._question_tokens, self._recomputer.max_tokens)
        # The last tokens are the question's words; the tokens before them are mostly chat history.
        return recompute.token_ids[job.end :][-room:]

    def _question_attention(
        self, job: LoadJob, recompute: RecomputeJob, question: Sequence[int]
    ) -> torch.Tensor:
        """Measure how much the question attends to each position; float32, on the device."""
        token_ids = [*recompute.token_ids[: job.end], *question]
        own_blocks = job.blocks[: -(-job.end // self._cache.shape.block_size)]
        return self._observer.question_attention(
            token_ids, (*own_blocks, *recompute.scratch_blocks), range(job.end, len(token_ids))
        )

    def _write_zeros(self, job: LoadJob, missing: Sequence[range]) -> None:
        """Write zeros to missing positions, whose blocks may hold anything, even NaN."""
        shape = self._cache.shape
        for positions in missing:
            zeros = torch.zeros(
                (self._cache.num_layers, 2, len(positions), shape.num_kv_heads, shape.head_dim),
                dtype=shape.dtype,
                device=self._cache.device,
            )
            slots = self._cache.slots(job.blocks, positions.start, positions.stop)
            self._cache.write(zeros, slots)
