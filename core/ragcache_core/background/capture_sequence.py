"""Arranges chunks that are computed ahead of questions as one prompt.

A chunk that was computed right after the template has attended to no other text. In a prompt it
comes after other chunks, and its KV differs much there. Any real text before the chunk reduces the
difference, and two chunks are nearly as good as more. So chunks are computed in sequences, and each
sequence begins with two chunks of context.

The sequences of a batch share one context. The engine's prefix cache has it, so it is computed
once. The context of a batch is the first two chunks of its first sequence. They are repeated at
that sequence's end, where they are captured after other chunks, too.

A batch is bounded, because a delete of a context's document also deletes what was computed after
it. A sequence is bounded, because attention costs grow with its length, and because questions have
prompts of such lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

SEQUENCE_TOKENS = 2048
"""Most tokens of a sequence, without the template."""

CONTEXT_CHUNKS = 2
CONTEXT_TOKENS = 200
"""A context has at least so many chunks, and so many tokens."""

CONTEXT_SEQUENCES = 8
"""Sequences of a batch. The context's share of their computation is then small."""


def context_size(num_tokens: Sequence[int]) -> int:
    """Return how many leading chunks are enough context.

    Args:
        num_tokens: Length of each chunk.
    """
    total = 0
    for count, tokens in enumerate(num_tokens, start=1):
        total += tokens
        if count >= CONTEXT_CHUNKS and total >= CONTEXT_TOKENS:
            return count
    return len(num_tokens)


def first_order(num_tokens: Sequence[int]) -> list[int]:
    """Return the order of chunks in the first sequence of a batch, as indexes.

    The context comes first, and again at the end. A chunk is never repeated right after itself.
    """
    repeated = min(context_size(num_tokens), len(num_tokens) - 1)
    return [*range(len(num_tokens)), *range(repeated)]


def fitting_chunks(num_tokens: Sequence[int], max_tokens: int, *, is_first: bool) -> int:
    """Return how many leading chunks fit a sequence; at least one if there is any.

    Args:
        num_tokens: Length of each chunk that could be in the sequence, in its order.
        max_tokens: Most tokens of the chunks together, without the context before them.
        is_first: Whether the sequence is the first one of a batch.
    """
    count = 0
    for tried in range(1, len(num_tokens) + 1):
        sizes = num_tokens[:tried]
        order = first_order(sizes) if is_first else range(tried)
        if tried > 1 and sum(sizes[index] for index in order) > max_tokens:
            break
        count = tried
    return count
