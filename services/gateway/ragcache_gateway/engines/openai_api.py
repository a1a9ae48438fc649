"""Servers of OpenAI's API that are not vLLM: what they get, and their answers in vLLM's form.

Servers differ in what they leave out. So events and answers are completed here: with the id and the
model's name that the client knows, with indexes of choices, and with OpenAI's finish reasons.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
from pydantic import ValidationError

from ragcache_gateway.engines.completion import (
    PROMPT_TEXT,
    TRANSFER_PARAMS,
    Usage,
)
from ragcache_gateway.prompts.prompt_text import PromptText

FIRST_VLLM: Final = (0, 32)
"""Version of vLLM from which on a chat takes the token ids of its prompt."""

_OF_VLLM: Final = frozenset(
    {
        PROMPT_TEXT,
        TRANSFER_PARAMS,
        "cache_salt",
        "priority",
        "return_token_ids",
        "return_tokens_as_token_ids",
    }
)
"""Fields that the gateway itself sets and that only vLLM knows."""

_REASONS: Final[Mapping[str, str | None]] = {
    "": None,
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "max_tokens": "length",
}
"""OpenAI's finish reasons, by what some servers send instead."""


def takes_token_ids(version: bytes) -> bool:
    """Whether a server is a vLLM whose chats take token ids, by its answer to ``GET /version``."""
    try:
        text = str(orjson.loads(version)["version"])
    except (ValueError, TypeError, KeyError):
        return False
    found = re.match(r"(\d+)\.(\d+)", text)
    return found is not None and (int(found[1]), int(found[2])) >= FIRST_VLLM


def openai_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body in which all that the gateway has set is of OpenAI's API.

    The prompt is a text, or the messages of a chat. Fields of the client stay as they are.
    """
    kept = {name: value for name, value in body.items() if name not in _OF_VLLM}
    # The newer name of the field is known to fewer servers.
    if (max_tokens := kept.pop("max_completion_tokens", None)) is not None:
        kept["max_tokens"] = max_tokens
    text: PromptText | None = body.get(PROMPT_TEXT)
    if text is None:
        return kept
    if not text.is_chat:
        return {**kept, "prompt": text.text()}
    kept.pop("prompt", None)
    tools = {"tools": text.template["tools"]} if "tools" in text.template else {}
    return {**tools, **kept, "messages": text.messages()}


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Gives the answer to one request the form that vLLM would give it.

    Args:
        model: Name of the model that the client knows.
        request_id: Id of the answer. None: the server's own.
    """

    model: str
    request_id: str | None

    def event(self, data: bytes) -> bytes | None:
        """Return the data of an event; None if it has nothing for a client.

        What cannot be read, and errors, stay as they are.
        """
        try:
            chunk = orjson.loads(data)
        except ValueError:
            return data
        if not isinstance(chunk, dict) or chunk.get("error"):
            return data
        self.whole(chunk)
        return orjson.dumps(chunk) if chunk["choices"] or chunk.get("usage") else None

    def whole(self, body: dict[str, Any]) -> None:
        """Complete an answer in one piece, or a chunk of a stream."""
        body.pop("error", None)
        body["model"] = self.model
        if self.request_id is not None:
            body["id"] = self.request_id
        choices = body.get("choices")
        body["choices"] = choices if isinstance(choices, list) else []
        for i, choice in enumerate(body["choices"]):
            if isinstance(choice, dict):
                choice.setdefault("index", i)
                reason = choice.get("finish_reason")
                if isinstance(reason, str):
                    reason = _REASONS.get(reason, reason)
                choice["finish_reason"] = reason
        if (usage := body.pop("usage", None)) is not None and _is_readable(usage):
            body["usage"] = usage


def _is_readable(usage: object) -> bool:
    """Whether a count of tokens is complete, after its sum was added."""
    if not isinstance(usage, dict):
        return False
    try:
        usage.setdefault("total_tokens", usage["prompt_tokens"] + usage["completion_tokens"])
        Usage.model_validate(usage)
    except (KeyError, TypeError, ValidationError):
        return False
    return True
