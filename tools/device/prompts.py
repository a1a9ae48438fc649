"""Prompts of exact lengths: a head, chunks that other prompts share, and a question."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ragcache_core.plan.prompt import Prompt, assemble

HEAD_TOKENS = 64
QUESTION_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Scene:
    """Chunks computed in two prompts, and prompts that take chunks from both.

    Attributes:
        head: Token ids before the first chunk.
        chunks: Token ids by [captured prompt][chunk].
        vocabulary: Number of token ids to draw from.
    """

    head: list[int]
    chunks: tuple[tuple[list[int], ...], ...]
    vocabulary: int

    @classmethod
    def make(cls, length: int, num_chunks: int, vocabulary: int, seed: int) -> Scene:
        """Return a scene whose prompts have ``length`` tokens each."""
        rng = random.Random(seed)
        per_chunk, more = divmod(length - HEAD_TOKENS - QUESTION_TOKENS, num_chunks)
        sizes = [per_chunk + (index < more) for index in range(num_chunks)]
        captured = tuple(tuple(_draw(rng, size, vocabulary) for size in sizes) for _ in range(2))
        return cls(_draw(rng, HEAD_TOKENS, vocabulary), captured, vocabulary)

    def captured(self, number: int, question: str = "") -> Prompt:
        """Return one of the prompts in which the chunks are computed."""
        return assemble(self.head, self.chunks[number], self._question(question))

    def blended(self, question: str = "") -> Prompt:
        """Return a prompt in which each chunk comes from the other prompt than its neighbours.

        The first two chunks change places as well, so that no chunk is after its own prefix.
        """
        mixed = [self.chunks[(index + 1) % 2][index] for index in range(len(self.chunks[0]))]
        mixed[:2] = mixed[1::-1]
        return assemble(self.head, mixed, self._question(question))

    def _question(self, name: str) -> list[int]:
        return _draw(random.Random(f"question {name}"), QUESTION_TOKENS, self.vocabulary)


def _draw(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(16, vocabulary) for _ in range(count)]
