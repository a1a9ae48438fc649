"""Carries on an answer at another engine after its engine was lost in the middle of it.

The other engine loads the prompt's KV from the cache store and computes the tokens that the client
has already, as part of its prompt. Then it generates the rest. Options that depend on all tokens of
an answer, such as stop strings, seeds and penalties, do not allow this. Such an answer is generated
again, if that gives the same text, and what the client has is left out. Tool calls, log
probabilities and several choices are not carried on.

Source: RAGCache section 6, fault tolerance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import orjson

from ragcache_core.errors import Unavailable
from ragcache_core.identity.packed_ids import PackedIds
from ragcache_gateway.engines.completion import (
    ENGINE,
    PROMPT_TOKEN_IDS,
    TRANSFER_PARAMS,
    Usage,
    text_of,
)

MAX_RESUMPTIONS: Final = 2
"""An answer that so many further engines have lost ends with an error."""

_CONTINUED: Final = frozenset(
    {
        "add_generation_prompt", "cache_salt", "chat_template_kwargs", "ignore_eos",
        "include_stop_str_in_output", "kv_transfer_params", "logit_bias", "max_completion_tokens",
        "max_tokens", "messages", "metadata", "min_p", "model", "priority", "prompt", "prompt_text",
        "return_token_ids", "seed", "skip_special_tokens", "stop_token_ids", "store", "stream",
        "stream_options", "temperature", "top_k", "top_p", "truncate_prompt_tokens", "user",
    }
)  # fmt: skip
"""Fields whose effect on a token does not depend on the tokens of the answer before it."""

_REPEATED: Final = _CONTINUED | {
    "frequency_penalty", "min_tokens", "presence_penalty", "repetition_penalty", "response_format",
    "stop", "structured_outputs",
}  # fmt: skip
"""Fields of answers whose events have text alone, so that two streams can be compared."""

_UNSET: Final[tuple[object, ...]] = (None, [], {}, False)
_LENGTH_FIELDS: Final = ("max_completion_tokens", "max_tokens")
# In a string of JSON its quotes would be escaped, so text of an answer cannot match.
_TOKEN_IDS: Final = re.compile(rb'"(?:prompt_)?token_ids":\[([\d,]*)\]')
_HAS_TEXT: Final = re.compile(rb'"(?:content|text)":"[^"]')
_HAS_MORE: Final = re.compile(rb'"(?:reasoning(?:_content)?":"|tool_calls":\[\{)')


class Resumption(StrEnum):
    """How an answer is carried on."""

    CONTINUE = "continue"  # after the tokens so far
    REPEAT = "repeat"  # from its beginning, which is not sent again


def resumption_of(body: Mapping[str, Any], *, with_ids: bool) -> Resumption | None:
    """Return how the answer to a body can be carried on. None: not at all.

    Args:
        with_ids: Whether all engines take and give the ids of tokens.
    """
    names = {name for name, value in body.items() if value not in _UNSET}
    if body.get("n", 1) != 1:
        return None
    names.discard("n")
    if with_ids and names <= _CONTINUED and body.get("seed") is None:
        return Resumption.CONTINUE
    return Resumption.REPEAT if names <= _REPEATED and is_repeatable(body) else None


def is_repeatable(body: Mapping[str, Any]) -> bool:
    """Return whether every engine answers a body with the same tokens."""
    return body.get("temperature") == 0 or body.get("seed") is not None


def with_token_ids(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body whose events have the ids of their tokens."""
    return {**body, "return_token_ids": True}


def continued_body(body: Mapping[str, Any], token_ids: Sequence[int]) -> dict[str, Any] | None:
    """Return the body that continues an answer; None: it has no tokens left.

    Args:
        body: Of the answer.
        token_ids: The answer so far.
    """
    continued = dict(body)
    for name in _LENGTH_FIELDS:
        if continued.get(name) is not None:
            continued[name] -= len(token_ids)
            if continued[name] <= 0:
                return None
    params = dict(body[TRANSFER_PARAMS])
    is_chat = PROMPT_TOKEN_IDS in params
    prompt = params[PROMPT_TOKEN_IDS] if is_chat else body["prompt"]
    whole = PackedIds.join([prompt, token_ids])
    if is_chat:
        params[PROMPT_TOKEN_IDS] = whole
    else:
        continued["prompt"] = whole
    return {**continued, TRANSFER_PARAMS: params}


@dataclass(slots=True)
class SentAnswer:
    """What a client has of an answer.

    Attributes:
        way: How the answer would be carried on.
        shows_ids: The client wants the ids of tokens.
        token_ids: Of the events so far, up to the last one with text, if ``way`` is to continue.
        text: Of the events so far, if ``way`` is to repeat.
        has_more: An event had more than text, such as reasoning, or text without its tokens. The
            answer is not carried on.
        head: Id and time of the answer, from its first event.
    """

    way: Resumption
    shows_ids: bool = False
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    has_more: bool = False
    head: dict[str, Any] = field(default_factory=dict)
    _silent: list[int] = field(default_factory=list)  # ids after the last text

    def take(self, events: Sequence[bytes]) -> list[bytes]:
        """Record events that the client gets; return them as it gets them."""
        return [self._take(event) for event in events]

    def forget_silent(self) -> None:
        """Forget the tokens after the last text, which another engine generates again."""
        self._silent.clear()

    def _take(self, event: bytes) -> bytes:
        self.has_more = self.has_more or _HAS_MORE.search(event) is not None
        if not self.head:
            chunk = orjson.loads(without_token_ids(event))
            self.head = {name: chunk[name] for name in ("id", "created") if name in chunk}
        if self.way is Resumption.REPEAT:
            self.text += text_of(orjson.loads(event))
            return event
        # A token without text is part of a character.
        self._silent += token_ids_in(event)
        if _HAS_TEXT.search(event):
            self.has_more = self.has_more or not self._silent
            self.token_ids += self._silent
            self._silent.clear()
        return event if self.shows_ids else without_token_ids(event)


def token_ids_in(event: bytes) -> list[int]:
    """Return the ids of the tokens that an event adds to an answer."""
    found = [
        one[1] for one in _TOKEN_IDS.finditer(event) if one[0].startswith(b'"token_ids"') and one[1]
    ]
    return [int(number) for ids in found for number in ids.split(b",")]


def without_token_ids(event: bytes) -> bytes:
    """Return an event as it is if a request does not ask for the ids of tokens."""
    return _TOKEN_IDS.sub(lambda one: one[0].partition(b":")[0] + b":null", event)


class ResumedStream:
    """Makes the events of a further engine those of the answer that it carries on.

    Args:
        sent: What the client has.
        same_text: Whether the whole text is what one engine would have generated. The first event
            tells it.
    """

    def __init__(self, sent: SentAnswer, *, same_text: bool) -> None:
        sent.forget_silent()
        self._sent = sent
        self._left = sent.text  # of a repeated answer, what is not to be sent again
        self._num_continued = len(sent.token_ids)
        self._resumed: dict[str, Any] | None = {"resumed": {"same_text": same_text}}

    def take(self, events: Sequence[bytes]) -> list[bytes]:
        """Return the events for the client. Raises Unavailable if a repeated text differs."""
        chunks = (self.adapt(orjson.loads(event)) for event in events)
        # The answer may be lost again.
        return self._sent.take([orjson.dumps(chunk) for chunk in chunks if chunk is not None])

    def adapt(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Return a chunk for the client. None: the client has its text, or it has none."""
        for choice in chunk["choices"]:
            delta = choice.get("delta")
            if isinstance(delta, dict):
                delta.pop("role", None)
            text = text_of({"choices": [choice]})
            if self._left and text:
                common = min(len(text), len(self._left))
                if text[:common] != self._left[:common]:
                    raise Unavailable(ENGINE, "another engine did not repeat the answer so far")
                self._left = self._left[common:]
                _set_text(choice, text[common:])
                text = text[common:]
            if not text and not choice.get("finish_reason") and not choice.get("token_ids"):
                return None
        chunk |= self._sent.head
        if self._resumed is not None:
            chunk["ragcache"], self._resumed = self._resumed, None
        return chunk

    def usage(self, usage: Usage) -> Usage:
        """Return the usage of the whole answer, from that of its last engine."""
        moved = self._num_continued
        counts = {
            "prompt_tokens": usage.prompt_tokens - moved,
            "completion_tokens": usage.completion_tokens + moved,
        }
        return usage.model_copy(update=counts)


def _set_text(choice: dict[str, Any], text: str) -> None:
    if isinstance(choice.get("delta"), dict):
        choice["delta"]["content"] = text
    else:
        choice["text"] = text
