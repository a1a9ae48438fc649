"""A conversation as the prompt needs it: system prompt, history, question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.errors import InvalidInput
from ragcache_core.plan.prompt import DEFAULT_SYSTEM_PROMPT
from ragcache_gateway.chat.schema import ChatMessage

_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Turn:
    """An earlier message. role: ``user`` or ``assistant``."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """system stands before the documents; history and question after them.

    So what the documents' KV depends on does not change from turn to turn.
    """

    system: str
    history: tuple[Turn, ...]
    question: str

    def num_chars(self) -> int:
        """Length of everything said."""
        return sum(map(len, (self.system, *(t.content for t in self.history), self.question)))


def read_conversation(messages: Sequence[ChatMessage]) -> Conversation:
    """Take a request's messages apart. Raises InvalidInput naming the message."""
    leading = 0
    while leading < len(messages) and messages[leading].role in _SYSTEM_ROLES:
        leading += 1
    for index, message in enumerate(messages[leading:], leading):
        if message.role in _SYSTEM_ROLES:
            raise InvalidInput(
                f"messages[{index}].role",
                f"is {message.role} after the conversation has begun",
                "put system messages first",
            )
    last = len(messages) - 1
    if last < leading or messages[last].role != "user":
        raise InvalidInput(
            f"messages[{last}].role",
            f"is {messages[last].role}, but the last message is the question",
            "end with a message of the user",
        )
    question = messages[last].text()
    if not question.strip():
        raise InvalidInput(f"messages[{last}].content", "is empty", "send a question")
    system = "\n\n".join(filter(str.strip, (m.text() for m in messages[:leading])))
    history = tuple(Turn(m.role, m.text()) for m in messages[leading:last])
    return Conversation(system or DEFAULT_SYSTEM_PROMPT, history, question)
