"""Prompts that compute chunks ahead of questions, and their plans."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.background.capture_sequence import first_order
from ragcache_core.background.precompute_queue import QueuedPrefill
from ragcache_core.plan.prompt import Prompt, assemble, plan_exact
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_gateway.prompts.reuse_mode import ServedModel


@dataclass(frozen=True, slots=True)
class TokenizedPrefill:
    """A queued prefill with the token ids of its chunks."""

    queued: QueuedPrefill
    chunks: tuple[Sequence[int], ...]

    @property
    def num_tokens(self) -> int:
        """Length of all chunks together."""
        return sum(map(len, self.chunks))


@dataclass(frozen=True, slots=True)
class CaptureJob:
    """A prompt whose prefill computes chunks.

    Args:
        prefills: What is computed.
        context: What is only there to come before it.
        ends: For each of them, the position in the prompt at which it is complete.
        documents: Name of the document of each of the prompt's chunks.
        planned_at_ms: Unix time before any of the chunks was written or searched.
        blends: Whether questions blend the chunks; otherwise they reuse the whole prompt.
    """

    prefills: tuple[TokenizedPrefill, ...]
    ends: tuple[int, ...]
    context: tuple[TokenizedPrefill, ...]
    prompt: Prompt
    documents: tuple[str, ...]
    planned_at_ms: int
    blends: bool

    @property
    def domain(self) -> str:
        """Access domain of all its prefills."""
        return self.prefills[0].queued.prefill.domain

    @property
    def expected_cached(self) -> int:
        """Tokens at the beginning that the prompt before it has had, too."""
        return self.prompt.head + sum(one.num_tokens for one in self.context)

    def beginning(self, end: int) -> Prompt:
        """Return the prompt up to a position, with the segments that are complete there."""
        prompt = self.prompt
        return Prompt(
            prompt.token_ids[:end],
            prompt.head if prompt.head <= end else 0,
            tuple(chunk_end for chunk_end in prompt.chunk_ends if chunk_end <= end),
            own_head=False,
        )

    def plan(self, beginning: Prompt, model: ServedModel) -> ReusePlan:
        """Make the plan for a beginning of the prompt."""
        request = f"precompute-{uuid.uuid4().hex}"
        documents = self.documents[: len(beginning.chunk_ends)]
        # Exact, so that nothing is blended into what is stored. The engine does not observe the
        # chunks' attention: questions choose what is recomputed, and an observation takes as long
        # as the computation.
        return plan_exact(
            beginning, model.space, self.domain, request, documents, self.planned_at_ms
        )


def sequence_job(
    head: Sequence[int],
    prefills: Sequence[TokenizedPrefill],
    context: Sequence[TokenizedPrefill] = (),
) -> CaptureJob:
    """Make the job that computes chunks one after the other.

    Args:
        head: Token ids of the template before the chunks.
        context: Other chunks to put before them. Empty: the first ones are repeated at the end.
    """
    if context:
        in_order = [*context, *prefills]
    else:
        in_order = [prefills[i] for i in first_order([one.num_tokens for one in prefills])]
    prompt = assemble(head, [one.chunks[0] for one in in_order], ())
    # A chunk that is repeated is complete at its last position.
    end_of = {id(one): end for one, end in zip(in_order, prompt.chunk_ends, strict=True)}
    return CaptureJob(
        prefills=tuple(prefills),
        ends=tuple(end_of[id(one)] for one in prefills),
        context=tuple(context),
        prompt=prompt,
        documents=tuple(one.queued.prefill.documents[0] for one in in_order),
        planned_at_ms=min(one.queued.prefill.planned_at_ms for one in in_order),
        blends=True,
    )


def context_job(head: Sequence[int], context: TokenizedPrefill) -> CaptureJob:
    """Make the job that computes chunks exactly as a question has them."""
    prompt = assemble(head, context.chunks, ())
    prefill = context.queued.prefill
    return CaptureJob(
        prefills=(context,),
        ends=(len(prompt.token_ids),),
        context=(),
        prompt=prompt,
        documents=prefill.documents,
        planned_at_ms=prefill.planned_at_ms,
        blends=False,
    )
