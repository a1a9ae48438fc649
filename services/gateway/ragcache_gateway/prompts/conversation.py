"""A conversation as the prompt needs it: system prompt, history, question."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """An earlier message. Its role is ``user`` or ``assistant``."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """The parts of a conversation around the documents.

    The system prompt comes before the documents, history and question come after them. So the
    tokens before the documents, which their KV depends on, stay the same from turn to turn.

    Attributes:
        stable_prefix: Number of leading characters of the system prompt that other requests have,
            too. None: unknown.
    """

    system: str
    history: tuple[Turn, ...]
    question: str
    stable_prefix: int | None = None

    def num_chars(self) -> int:
        """Length of all texts together."""
        return sum(map(len, (self.system, *(turn.content for turn in self.history), self.question)))
