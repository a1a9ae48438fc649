"""The prompts in which chunks are captured before a question asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.scheduling.capture_sequence import SEQUENCE_TOKENS, context_size, fitting_chunks

MAX_BEFORE = 4
"""Chunks before a captured one at most, besides the context. The gateway's sequences are longer;
these cost less and bring nearly the same."""


@dataclass(frozen=True, slots=True)
class AheadSequences:
    """All chunks, cut into sequences as the gateway cuts them.

    Attributes:
        context: The chunks before every sequence.
        before: By chunk, those before it in its sequence, first to last.
    """

    context: tuple[tuple[int, ...], ...]
    before: dict[tuple[int, ...], tuple[tuple[int, ...], ...]]

    def prefix_of(self, chunk: Sequence[int]) -> list[list[int]]:
        before = self.before[tuple(chunk)][-MAX_BEFORE:]
        return [list(ids) for ids in (*self.context, *before)]


def ahead_sequences(chunks: Sequence[Sequence[int]]) -> AheadSequences:
    """Cut chunks, in the order of their documents, into sequences.

    The context is the first chunks. They come again at the end of the first sequence, after the
    others.
    """
    left = [tuple(ids) for ids in chunks]
    context = left[: context_size([len(ids) for ids in left])]
    before: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
    is_first = True
    while left:
        room = SEQUENCE_TOKENS - (0 if is_first else sum(map(len, context)))
        sizes = [len(ids) for ids in left]
        count = fitting_chunks(sizes, room, is_first=is_first)
        sequence, left = left[:count], left[count:]
        if is_first:
            sequence = [*sequence[len(context) :], *context]
        for index, ids in enumerate(sequence):
            before.setdefault(ids, tuple(sequence[:index]))
        is_first = False
    return AheadSequences(tuple(context), before)
