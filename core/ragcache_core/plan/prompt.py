"""A prompt as segments: template head, chunks, template tail.

Each chunk is tokenized by itself, so its ids do not depend on its neighbours or its rank. Each
chunk ends with the separator, so segments follow each other without gaps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ragcache_core.identity.keys import KVSpace, chunk_key, chunk_key_of_digest
from ragcache_core.identity.packed_ids import PackedIds
from ragcache_core.plan.reuse_plan import Action, ReusePlan, Segment

DEFAULT_SYSTEM_PROMPT = (
    "Answer the question from the documents. "
    "If they do not contain the answer, reply: not in the documents."
)
CHUNK_SEPARATOR = "\n\n"
"""Follows each chunk. It is tokenized by itself and counts as the chunk's last tokens."""

CHUNKS_PLACEHOLDER = "\x00ragcache-chunks\x00"
"""Marks the position of the chunks in the rendered chat template.

User text cannot contain it, because the gateway rejects NUL characters.
"""

STABLE_PREFIX_END = "\x00ragcache-stable-prefix\x00"
"""Marks the end of the stable part of a system prompt in the rendered chat template."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt and the bounds of its segments.

    Attributes:
        head: Number of template tokens before the first chunk.
        chunk_ends: End offset of each chunk, ascending. Chunks follow the head without gaps.
        stable_head: Number of leading tokens of the head that are a segment of their own, because
            other prompts have them too. 0: the head is one segment.
        chunk_digests: ``token_digest`` of each chunk. Empty: they are computed for a plan.
        comes_once: Whether no other prompt is expected to have the part of the head that varies.
        own_head: Whether the head has text of the caller, and not of the platform alone.
        own_chunks: Whether the chunks are texts of the caller, and not of ingested documents.
    """

    token_ids: PackedIds
    head: int
    chunk_ends: tuple[int, ...]
    stable_head: int = 0
    chunk_digests: tuple[bytes, ...] = field(default=(), compare=False)
    comes_once: bool = field(default=False, compare=False)
    own_head: bool = field(default=True, compare=False)
    own_chunks: bool = field(default=False, compare=False)

    @property
    def head_ends(self) -> tuple[int, ...]:
        """End offset of each segment of the head, ascending. Empty without a head."""
        return tuple(sorted({end for end in (self.stable_head, self.head) if end}))


def assemble(
    head_ids: Sequence[int],
    chunks_ids: Sequence[Sequence[int]],
    tail_ids: Sequence[int],
    stable_head: int = 0,
    chunk_digests: Sequence[bytes] = (),
) -> Prompt:
    """Join tokenized parts into one prompt. The other arguments are as in ``Prompt``."""
    ends = itertools.accumulate(map(len, chunks_ids), initial=len(head_ids))
    return Prompt(
        PackedIds.join([head_ids, *chunks_ids, tail_ids]),
        len(head_ids),
        tuple(ends)[1:],
        stable_head,
        tuple(chunk_digests),
    )


def plan_exact(
    prompt: Prompt,
    space: KVSpace,
    domain: str,
    request: str,
    documents: Sequence[str] = (),
    planned_at_ms: int = 0,
) -> ReusePlan:
    """Plan to load and store the head and every chunk as exact variants.

    The head (the system prompt) is a segment too, or two: without its KV no chunk after it could be
    exact. After a head that comes once nothing could be loaded again, so it is only computed.

    Args:
        documents: Name of each chunk's document (``document_name``). Empty: unknown.
        planned_at_ms: Unix time before the gateway searched for the chunks. 0: unknown.
    """
    segments = _segments(prompt, space, domain, Action.EXACT, documents)
    if prompt.comes_once:
        stable = prompt.stable_head if prompt.stable_head < prompt.head else 0
        segments = tuple(
            replace(one, action=Action.COMPUTE) if one.start >= stable else one for one in segments
        )
    return ReusePlan(
        request,
        domain,
        segments,
        planned_at_ms,
        num_head=len(segments) if prompt.own_chunks else len(prompt.head_ends),
        own_head=prompt.own_head or prompt.own_chunks,
    )


def plan_blend(
    prompt: Prompt,
    space: KVSpace,
    domain: str,
    request: str,
    recompute_share: float,
    documents: Sequence[str] = (),
) -> ReusePlan:
    """Plan to load chunks after any prefix and to recompute a share of their tokens.

    The head is exact or computed. Where a part of it differs from prompt to prompt, the engine
    computes that part, and reuses the chunks after it.

    Args:
        recompute_share: Maximum share of the tokens from other prefixes that may be recomputed, in
            [0, 1].
        documents: As in ``plan_exact``.

    Source: Cache-Craft section 3.
    """
    exact = plan_exact(replace(prompt, comes_once=False), space, domain, request, documents)
    segments = tuple(
        replace(segment, action=Action.BLEND) if segment.start >= prompt.head else segment
        for segment in exact.segments
    )
    return replace(exact, segments=segments, recompute_share=recompute_share)


def plan_compute(prompt: Prompt, space: KVSpace, domain: str, request: str) -> ReusePlan:
    """Plan to load and store nothing (``reuse: off``)."""
    return ReusePlan(request, domain, _segments(prompt, space, domain, Action.COMPUTE, ()))


def _segments(
    prompt: Prompt, space: KVSpace, domain: str, action: Action, documents: Sequence[str]
) -> tuple[Segment, ...]:
    bounds = itertools.pairwise([0, *prompt.head_ends, *prompt.chunk_ends])
    # The head belongs to no document.
    in_head = [""] * len(prompt.head_ends)
    names = [*in_head, *(documents or [""] * len(prompt.chunk_ends))]
    digests = [b"" for _ in prompt.head_ends]
    digests += prompt.chunk_digests or [b""] * len(prompt.chunk_ends)
    return tuple(
        Segment(
            chunk_key_of_digest(space, domain, digest)
            if digest
            else chunk_key(space, domain, prompt.token_ids[start:end]),
            start,
            end,
            action,
            document,
        )
        for (start, end), document, digest in zip(bounds, names, digests, strict=True)
        if start < end
    )
