"""Requests of the responses API, and the chats that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field

from ragcache_core.errors import InvalidInput
from ragcache_gateway.chat.content import read_content
from ragcache_gateway.chat.schema import MAX_MESSAGES, AnswerRequest, RefusedFields
from ragcache_wire.rest_fields.fields import PositiveCount

_NO_STATE: Final = "leave it out and send the whole conversation; the gateway keeps no responses"

REFUSED_FIELDS: Final[RefusedFields] = {
    "background": ((False,), _NO_STATE),
    "conversation": ((), _NO_STATE),
    "include": (([], ["reasoning.encrypted_content"]), "leave it out"),
    "max_tool_calls": ((), "leave it out; the client runs the tools"),
    "messages": ((), "send input"),
    "previous_response_id": ((), _NO_STATE),
    "prompt": ((), "send instructions and input"),
    "store": ((False,), "set it to false; the gateway keeps no responses"),
    "truncation": (("disabled",), "leave it out"),
}
"""Fields that need state, or tools that run elsewhere: the values that have no effect, and the
fix."""

_OWN_FIELDS: Final = frozenset(
    {"input", "instructions", "max_output_tokens", "reasoning", "text", "tools", "tool_choice"}
)


class ResponseReasoning(BaseModel):
    """How much the model thinks before it answers."""

    model_config = ConfigDict(extra="allow", strict=True)

    effort: str | None = None


class ResponseText(BaseModel):
    """The format of the answer."""

    model_config = ConfigDict(extra="allow", strict=True)

    format: dict[str, Any] | None = None


class ResponseRequest(AnswerRequest):
    """A question to answer from documents, in the format of the responses API.

    The gateway keeps no responses, so the input has the whole conversation. All further fields
    reach the engine as they are.
    """

    REFUSED: ClassVar = REFUSED_FIELDS

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"input": "Which region does billing run in?"}]},
    )

    input: str | list[dict[str, Any]] = Field(
        description="A question, or messages, tool calls and their results."
    )
    instructions: str | None = Field(default=None, description="The system prompt.")
    max_output_tokens: PositiveCount | None = None
    tools: list[dict[str, Any]] | None = Field(
        default=None, description="Functions that the model may call; no other tools."
    )
    tool_choice: str | dict[str, Any] | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None

    def to_chat(self) -> dict[str, Any]:
        """Return the chat request that this one stands for. Raises InvalidInput."""
        chat = self.model_dump(exclude_unset=True, exclude=set(_OWN_FIELDS))
        instructions = self.instructions
        system = [{"role": "system", "content": instructions}] if instructions else []
        chat["messages"] = [*system, *_messages(self.input)]
        if self.max_output_tokens is not None:
            chat["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            chat["tools"] = [_tool(tool, i) for i, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            chat["tool_choice"] = _tool_choice(self.tool_choice)
        if self.text is not None and self.text.format is not None:
            chat["response_format"] = _response_format(self.text.format)
        if self.reasoning is not None and self.reasoning.effort is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        return chat


def _messages(given: str | list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    if not given or (isinstance(given, str) and not given.strip()):
        raise InvalidInput("input", "is empty", "send a question")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if len(given) > MAX_MESSAGES:
        raise InvalidInput("input", f"has {len(given)} items", f"send at most {MAX_MESSAGES}")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        path = f"input[{i}]"
        match item.get("type", "message"):
            case "message":
                content = _content(item.get("content"), f"{path}.content")
                messages.append({"role": _role(item, path), "content": content})
            case "function_call":
                call = _call(item, path)
                if messages and messages[-1].get("tool_calls"):
                    messages[-1]["tool_calls"].append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "function_call_output":
                output = _content(item.get("output"), f"{path}.output")
                call_id = _text(item, "call_id", path)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case "reasoning":
                pass  # chat templates take the reasoning of the present turn only
            case other:
                raise InvalidInput(
                    f"{path}.type",
                    f"is {other!r}",
                    "send messages, function calls and their outputs",
                )
    return messages


def _role(item: Mapping[str, Any], path: str) -> str:
    role = item.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise InvalidInput(
            f"{path}.role", f"is {role!r}", "send system, developer, user or assistant"
        )
    return str(role)


def _content(content: Any, path: str) -> Any:
    """Check a content, and return it as a chat has it. Raises InvalidInput."""
    read_content(content, path)
    return [] if content is None else content


def _text(item: Mapping[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidInput(f"{path}.{name}", "is no text", "send a text")
    return value


def _call(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    function = {name: _text(item, name, path) for name in ("name", "arguments")}
    return {"id": _text(item, "call_id", path), "type": "function", "function": function}


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidInput(
            f"tools[{i}].type", f"is {tool.get('type')!r}", "send functions, which the client runs"
        )
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise InvalidInput("tool_choice.type", f"is {choice.get('type')!r}", "send function")
    return {"type": "function", "function": {"name": _text(choice, "name", "tool_choice")}}


def _response_format(wanted: dict[str, Any]) -> dict[str, Any]:
    if wanted.get("type") != "json_schema":
        return wanted
    schema = {name: value for name, value in wanted.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
