"""A prompt as text, for servers that take no token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ragcache_core.plan.prompt import CHUNK_SEPARATOR
from ragcache_gateway.prompts.conversation import Turn
from ragcache_gateway.prompts.passages import Passage, passage_text

_ANY_QUESTION = (Turn("user", "?"),)


@dataclass(frozen=True, slots=True)
class PromptText:
    """The parts of a prompt as text, in the same order as its tokens.

    Attributes:
        before: Text of the system message before the documents. None: there is no such message.
        after: Text of the system message after them, or the text that a completion continues.
        turns: The messages after it. None: the prompt has no chat template.
        template: Arguments of the chat template, such as tools.
        passages: The documents, in the order of the prompt.
        clean: Makes a text safe, as ``ChatTokenizer.spelled_apart``: that of documents, messages
            and tool calls alike.
    """

    before: str | None
    after: str
    turns: tuple[Turn, ...] | None
    template: Mapping[str, Any] = field(default_factory=dict)
    passages: tuple[Passage, ...] = ()
    clean: Callable[[str], str] = str

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is one of a chat."""
        return self.turns is not None

    def head(self) -> PromptText:
        """Return the part before the documents, with a turn after it, which templates want."""
        return replace(self, after="", turns=_ANY_QUESTION)

    def text(self) -> str:
        """Return the documents and the text around them, without a chat template."""
        chunks = (passage_text(one.chunk) + CHUNK_SEPARATOR for one in self.passages)
        return self.clean(f"{self.before or ''}{''.join(chunks)}{self.after}")

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of a chat, as OpenAI's API takes them."""
        system = [] if self.before is None else [{"role": "system", "content": self.text()}]
        return [*system, *(self._cleaned(_message(turn)) for turn in self.turns or ())]

    def _cleaned(self, value: Any) -> Any:
        match value:
            case str():
                return self.clean(value)
            case list() | tuple():
                return [self._cleaned(one) for one in value]
            case Mapping():
                return {name: self._cleaned(one) for name, one in value.items()}
            case _:
                return value


def _message(turn: Turn) -> dict[str, Any]:
    """Return a turn with the arguments of its tool calls as text, which only templates parse."""
    message = turn.to_template()
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [
            {"type": "function", **call, "function": _as_text(call["function"])} for call in calls
        ]
    return message


def _as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
