"""From the messages of a request to a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache_core.errors import InvalidInput
from ragcache_core.plan.prompt import DEFAULT_SYSTEM_PROMPT
from ragcache_gateway.chat.schema import ChatMessage
from ragcache_gateway.prompts.conversation import Conversation, Turn

_SYSTEM_ROLES = ("system", "developer")


def read_conversation(
    messages: Sequence[ChatMessage], stable_prefix: int | None = None
) -> Conversation:
    """Split messages into system prompt, history and question.

    Args:
        messages: The messages of a request.
        stable_prefix: Number of leading characters of the system prompt that other requests have,
            too. None: unknown.

    Raises:
        InvalidInput: A message has the wrong role or is empty, or the system prompt is shorter than
            its stable prefix. The error names the field.
    """
    num_system = 0
    while num_system < len(messages) and messages[num_system].role in _SYSTEM_ROLES:
        num_system += 1
    for index, message in enumerate(messages[num_system:], num_system):
        if message.role in _SYSTEM_ROLES:
            raise InvalidInput(
                f"messages[{index}].role",
                f"is {message.role} after the conversation has begun",
                "put system messages first",
            )
    last = len(messages) - 1
    if last < num_system or messages[last].role != "user":
        raise InvalidInput(
            f"messages[{last}].role",
            f"is {messages[last].role}, but the last message is the question",
            "end with a message of the user",
        )
    question = messages[last].text()
    if not question.strip():
        raise InvalidInput(f"messages[{last}].content", "is empty", "send a question")
    system_texts = (message.text() for message in messages[:num_system])
    system = "\n\n".join(filter(str.strip, system_texts))
    history = tuple(Turn(message.role, message.text()) for message in messages[num_system:last])
    if stable_prefix is not None and stable_prefix > len(system):
        raise InvalidInput(
            "ragcache.stable_prefix",
            f"is {stable_prefix}, and the system prompt has {len(system)} characters",
            "count the characters of the system messages, joined by blank lines",
        )
    return Conversation(system or DEFAULT_SYSTEM_PROMPT, history, question, stable_prefix)
