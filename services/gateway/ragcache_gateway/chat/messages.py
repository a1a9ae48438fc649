"""From the messages of a request to a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from ragcache_core.access.json_bounds import MAX_VALUES, count_values
from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_gateway.chat.schema import ChatMessage, ChatRequest, check_values
from ragcache_gateway.prompts.conversation import Conversation, Turn

_SYSTEM_ROLES: Final = ("system", "developer")
_TEMPLATE_ROLES: Final = {"developer": "system", "function": "tool"}
"""Roles of turns by names that templates know."""

_TEMPLATE_FIELDS: Final = (
    "tools", "documents", "add_generation_prompt", "continue_final_message", "reasoning_effort",
)  # fmt: skip
_RESERVED_ARGUMENTS: Final = frozenset(
    {
        *_TEMPLATE_FIELDS,
        *("conversation", "messages", "chat_template", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        "tokenizer_kwargs",
    }
) - {"reasoning_effort"}
_MESSAGE_FIELDS: Final = frozenset({"role", "content", "refusal"})


def read_conversation(request: ChatRequest) -> Conversation:
    """Split the messages of a request into system prompt and turns.

    Raises:
        InvalidInput: There is no text, the system prompt is shorter than its stable prefix, a tool
            call cannot be read, or an argument of the template is reserved. It names the field.
        TooLarge: The arguments of all tool calls together have too many values.
    """
    messages = request.messages
    num_system = 0
    while num_system < len(messages) and messages[num_system].role in _SYSTEM_ROLES:
        num_system += 1
    system_texts = (message.body.text for message in messages[:num_system])
    system = "\n\n".join(filter(str.strip, system_texts))
    values = _ValuesOfCalls()
    turns = tuple(
        _turn(message, i, values) for i, message in enumerate(messages) if i >= num_system
    )
    if not (system or turns):
        raise InvalidInput("messages", "have no text", "send a question")
    stable_prefix = request.ragcache.stable_prefix
    if stable_prefix is not None and stable_prefix > len(system):
        raise InvalidInput(
            "ragcache.stable_prefix",
            f"is {stable_prefix}, and the system prompt has {len(system)} characters",
            "count the characters of the system messages, joined by blank lines",
        )
    arguments = _template_arguments(request)
    return Conversation(system or None, turns, stable_prefix, arguments, request.ragcache.layout)


def question_field(messages: Sequence[ChatMessage]) -> str:
    """Return the path of the message that has the question."""
    last = max(
        (i for i, one in enumerate(messages) if one.role == "user"), default=len(messages) - 1
    )
    return f"messages[{last}].content"


class _ValuesOfCalls:
    """Bounds the values that the arguments of all tool calls of a request have as text."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def take(self, arguments: str, path: str) -> None:
        """Count the values of a call. Raises InvalidInput and TooLarge."""
        try:
            self._left -= count_values(arguments.encode(), path, self._left)
        except TooLarge:
            problem = f"has, with those before it, over {MAX_VALUES} values"
            raise TooLarge(path, problem, "send fewer tool calls") from None


def _turn(message: ChatMessage, i: int, values: _ValuesOfCalls) -> Turn:
    fields = message.model_dump(exclude_unset=True, exclude=set(_MESSAGE_FIELDS))
    fields = {name: value for name, value in fields.items() if value not in (None, [], {})}
    called = fields.pop("function_call", None)
    calls = fields.get("tool_calls") or (
        [{"id": f"call_{i}", "function": called}] if called else ()
    )
    if calls:
        fields["tool_calls"] = [
            _tool_call(call, f"messages[{i}].tool_calls[{n}].function", values)
            for n, call in enumerate(calls)
        ]
    return Turn(_TEMPLATE_ROLES.get(message.role, message.role), message.body.text, fields)


def _tool_call(call: dict[str, Any], path: str, values: _ValuesOfCalls) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which templates expect."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidInput(path, "is missing", "send name and arguments of the call")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        values.take(arguments, f"{path}.arguments")
        try:
            arguments = json.loads(arguments)
        except ValueError:
            # A model may have written it, and the history has to stay usable. vLLM does the same.
            arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    check_values({f"{path}.arguments": arguments})
    return {**call, "function": {**function, "arguments": arguments}}


def _template_arguments(request: ChatRequest) -> dict[str, Any]:
    """Return the arguments of the chat template, as vLLM makes them of a request."""
    given = request.chat_template_kwargs or {}
    for name in given:
        if name in _RESERVED_ARGUMENTS:
            raise InvalidInput(
                f"chat_template_kwargs.{name}", "is set by the gateway", "leave it out"
            )
    fields = {"tools": request.tools, **(request.model_extra or {})}
    arguments = {name: fields[name] for name in _TEMPLATE_FIELDS if fields.get(name) is not None}
    effort = arguments.get("reasoning_effort")
    if effort is not None:
        arguments["enable_thinking"] = effort != "none"
    return {**arguments, **given}
