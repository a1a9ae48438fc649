"""A prompt as segments: template head, chunks, template tail.

Chunks are tokenized by themselves, so that their ids never depend on their neighbours or their
rank, and each ends with the separator, so that segments follow each other without gaps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ragcache_core.identity.keys import KVSpace, chunk_key
from ragcache_core.plan.reuse_plan import Action, ReusePlan, Segment

DEFAULT_SYSTEM_PROMPT = (
    "Answer the question from the documents. "
    "If they do not contain the answer, reply: not in the documents."
)
CHUNK_SEPARATOR = "\n\n"
"""Follows every chunk; tokenized by itself and counted as the chunk's last tokens."""

CHUNKS_PLACEHOLDER = "\x00ragcache-chunks\x00"
"""Stands in the rendered chat template where the chunks go; no text of a user can hold it,
because the gateway refuses NUL characters."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids and where its segments lie.

    head: number of template tokens before the first chunk.
    chunk_ends: end offset of each chunk, ascending; chunks follow the head without gaps.
    """

    token_ids: tuple[int, ...]
    head: int
    chunk_ends: tuple[int, ...]


def assemble(
    head_ids: Sequence[int], chunks_ids: Sequence[Sequence[int]], tail_ids: Sequence[int]
) -> Prompt:
    """Join tokenized parts into one prompt."""
    token_ids = list(head_ids)
    ends = []
    for ids in chunks_ids:
        token_ids.extend(ids)
        ends.append(len(token_ids))
    token_ids.extend(tail_ids)
    return Prompt(tuple(token_ids), len(head_ids), tuple(ends))


def plan_exact(
    prompt: Prompt,
    space: KVSpace,
    domain: str,
    request: str,
    documents: Sequence[str] = (),
    planned_at_ms: int = 0,
) -> ReusePlan:
    """Plan that reuses and stores the head and every chunk as exact variants.

    documents: name of each chunk's document (``document_name``); none if nobody knows.
    planned_at_ms: Unix time before the chunks were looked for; 0 if nobody knows.
    The head (system prompt) is a segment too: without its KV no chunk behind it could be exact.
    """
    segments = _segments(prompt, space, domain, Action.EXACT, documents)
    return ReusePlan(request, domain, segments, planned_at_ms)


def plan_blend(
    prompt: Prompt,
    space: KVSpace,
    domain: str,
    request: str,
    budget: float,
    documents: Sequence[str] = (),
    planned_at_ms: int = 0,
    alpha: float | None = None,
) -> ReusePlan:
    """Plan that reuses chunks behind whatever prefix, and repairs them (Cache-Craft §3).

    budget: share of what comes from other prefixes that is computed anew at most. alpha: by which
    chunks want their share of it, as of ``ReusePlan``. The head stands before the chunks of every
    prompt and is exact or computed. Others: as of ``plan_exact``.
    """
    segments = tuple(
        replace(segment, action=Action.BLEND) if segment.start >= prompt.head else segment
        for segment in _segments(prompt, space, domain, Action.EXACT, documents)
    )
    return ReusePlan(request, domain, segments, planned_at_ms, budget, alpha=alpha)


def plan_compute(prompt: Prompt, space: KVSpace, domain: str, request: str) -> ReusePlan:
    """Plan that neither loads nor stores anything (``reuse: off``)."""
    return ReusePlan(request, domain, _segments(prompt, space, domain, Action.COMPUTE, ()))


def _segments(
    prompt: Prompt, space: KVSpace, domain: str, action: Action, documents: Sequence[str]
) -> tuple[Segment, ...]:
    bounds = itertools.pairwise([0, prompt.head, *prompt.chunk_ends])
    # The head is of no document.
    names = ["", *(documents or [""] * len(prompt.chunk_ends))]
    return tuple(
        Segment(chunk_key(space, domain, prompt.token_ids[start:end]), start, end, action, document)
        for (start, end), document in zip(bounds, names, strict=True)
        if start < end
    )
