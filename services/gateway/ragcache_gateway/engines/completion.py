"""The engines' OpenAI API: request bodies, and what events and errors say."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from ragcache_core.cluster.sent_requests import SENT_FIELD, SentRequest
from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.identity.keys import domain_salt
from ragcache_core.identity.packed_ids import PackedIds
from ragcache_core.plan.reuse_plan import NO_REUSE, ReusePlan
from ragcache_core.plan.signature import SIGNATURE_FIELD, sign
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_gateway.prompts.builder import AnswerPrompt, TemplateFrame
from ragcache_gateway.prompts.prompt_text import PromptText
from ragcache_gateway.prompts.reuse_mode import ServedModel

ENGINE = "engine"

TRANSFER_PARAMS = "kv_transfer_params"
"""Field of a body with the plan and its signature."""

MAX_LOOP_TOKENS = 8192
"""Prompts of at most this length are planned and encoded in the event loop's thread, in about 0.1
ms. Threads take longer to change, and longer prompts would delay other streams."""

PROMPT_TEXT = "prompt_text"
"""Key of a body with its prompt as text (``PromptText``). No engine gets the key itself: those of
vLLM get the token ids, and others what ``openai_api.openai_body`` makes of the text."""

PROMPT_TOKEN_IDS = "prompt_token_ids"
"""Field of a chat's transfer parameters with the prompt."""

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"

FIRST_TOKEN_LOGPROBS = {"logprobs": True, "top_logprobs": 20, "return_tokens_as_token_ids": True}
"""Fields with which an engine's chat also returns the likeliest tokens, by their ids; 20 is vLLM's
limit."""

CONTROL_FIELDS = frozenset(
    {
        "cache_salt", "ec_transfer_params", "kv_transfer_params", "priority", "prompt_cache_key",
        "prompt_cache_retention", "prompt_embeds", "prompt_token_ids", "request_id", "session_id",
        "vllm_xargs",
    }
)  # fmt: skip
"""Fields that control an engine's caches and its scheduling, so only the gateway may set them.
``vllm_xargs`` belongs to them, because vLLM takes transfer parameters from it, too."""

_MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next text of a completion. The last one has a finish reason."""

    text: str
    finish_reason: str | None


class PromptTokensDetails(BaseModel):
    """How many prompt tokens the engine did not compute."""

    model_config = ConfigDict(extra="allow")

    cached_tokens: int | None = None


class Usage(BaseModel):
    """Tokens as the engine counted them."""

    model_config = ConfigDict(extra="allow")

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


def usage_of(body: Mapping[str, Any]) -> Usage | None:
    """Return the engine's count of tokens of an answer in one piece; None if it is not readable."""
    try:
        return Usage.model_validate(body.get("usage"))
    except ValidationError:
        return None


def finish_reasons(body: Mapping[str, Any]) -> list[str]:
    """Return why each choice of an answer, or of a chunk of its stream, has ended."""
    reasons = [one.get("finish_reason") for one in body["choices"] if isinstance(one, dict)]
    return [reason for reason in reasons if isinstance(reason, str)]


def text_of(body: Mapping[str, Any]) -> str:
    """Return the text of the first choice of an answer, or of a chunk of its stream."""
    for choice in body.get("choices") or ():
        return _text_of_choice(choice)
    return ""


def _text_of_choice(choice: Mapping[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or part.get("content") or "")


def completion_body(
    model: ServedModel,
    token_ids: Sequence[int],
    plan: ReusePlan,
    *,
    max_tokens: int,
    position: QueuePosition,
    text: PromptText | None = None,
) -> dict[str, Any]:
    """Make the body of a streamed, greedy completion of the gateway's own.

    It is for ``/v1/completions``. The engine's own prefix cache shares nothing of a trial, and
    otherwise what is of the plan's domain.

    Args:
        position: In the engine's queue, from now on.
        text: The prompt as text. None: only an engine with RagCache gets it.
    """
    body: dict[str, Any] = {
        "model": model.name,
        "prompt": PackedIds.of(token_ids),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        TRANSFER_PARAMS: {"ragcache": plan.encode()},
        "temperature": 0.0,
        **({PROMPT_TEXT: text} if text is not None else {}),
    }
    # No other request has the salt of a trial.
    salt = plan.request if plan.trial else domain_salt(plan.domain)
    return with_engine_controls(body, cache_salt=salt, position=position)


def client_body(
    fields: Mapping[str, Any], *, model: str, max_tokens_field: str, max_tokens: int | None
) -> dict[str, Any]:
    """Make the engine's body from a client's request, with every field that a client may set.

    Args:
        fields: The client's request without the ragcache extension.
        max_tokens_field: Name of the endpoint's field for the length of an answer.
        max_tokens: The length; None: as the client's fields say.
    """
    body = {name: value for name, value in fields.items() if name not in CONTROL_FIELDS}
    body["model"] = model
    if max_tokens is not None:
        body[max_tokens_field] = max_tokens
    if body.get("stream"):
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    return body


def with_prompt(body: dict[str, Any], prompt: AnswerPrompt, plan: ReusePlan) -> dict[str, Any]:
    """Return a client's body with the prompt that the gateway has built, and its plan.

    A chat has messages instead of a prompt. vLLM takes the token ids of a chat's prompt from the
    transfer parameters, removes them, and renders no template. It still parses tool calls and
    reasoning, and applies response formats, as the rest of the request says.
    """
    ids = prompt.prompt.token_ids
    params = {"ragcache": plan.encode()}
    body = {**body, PROMPT_TEXT: prompt.text}
    if "messages" in body:
        return {**body, TRANSFER_PARAMS: {**params, PROMPT_TOKEN_IDS: ids}}
    return {**body, "prompt": ids, TRANSFER_PARAMS: params}


def with_plan(body: dict[str, Any], plan: ReusePlan) -> dict[str, Any]:
    """Return a body with another plan for its prompt."""
    return {**body, TRANSFER_PARAMS: {**body[TRANSFER_PARAMS], "ragcache": plan.encode()}}


def with_engine_controls(
    body: dict[str, Any],
    *,
    cache_salt: str | None = None,
    position: QueuePosition | None = None,
) -> dict[str, Any]:
    """Return a body with what controls the engine's prefix cache and its queue.

    Args:
        cache_salt: Separates this prompt in the engine's own prefix cache; None: not separated.
        position: In the engine's queue, for a request that is sent now.
    """
    controls = {
        "cache_salt": cache_salt,
        "priority": position and position.priority(time.time_ns() // 1_000_000),
    }
    return body | {name: value for name, value in controls.items() if value is not None}


def without_reuse(body: dict[str, Any]) -> dict[str, Any]:
    """Return a client's body for whose prompt the engine neither loads nor stores KV."""
    return {**body, TRANSFER_PARAMS: {"ragcache": NO_REUSE}}


def endpoint_of(body: Mapping[str, Any]) -> str:
    """Return the path of the engine's endpoint for a body."""
    return CHAT_COMPLETIONS if "messages" in body else COMPLETIONS


def request_id_headers(request_id: str | None) -> dict[str, str]:
    """Return headers that make vLLM answer with this id. It adds the endpoint's prefix itself."""
    return {} if request_id is None else {"X-Request-Id": request_id.partition("-")[2]}


def num_prompt_tokens(body: Mapping[str, Any]) -> float:
    """Return the tokens of a body's prompt. Infinity: unknown, it is a client's text."""
    ids = body.get(TRANSFER_PARAMS, {}).get(PROMPT_TOKEN_IDS, body.get("prompt"))
    return len(ids) if isinstance(ids, PackedIds | list) else math.inf


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Return the JSON of a body, in which token ids are packed."""
    try:
        return orjson.dumps(body, default=_to_array, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        # A client's own fields may have numbers over 64 bits, which only this encoder takes.
        return json.dumps(body, default=list).encode()


def _to_array(ids: object) -> npt.NDArray[np.uint32]:
    if not isinstance(ids, PackedIds):
        raise TypeError(f"{type(ids).__name__} is not part of a body")
    return ids.array


def with_signature(body: dict[str, Any], key: bytes, now_s: float) -> dict[str, Any]:
    """Return a body whose plan is signed for its prompt. One without a plan stays as it is.

    Args:
        body: As it is sent now.
        key: Signing key.
        now_s: Unix time.
    """
    params = body.get(TRANSFER_PARAMS, {})
    plan = params.get("ragcache", NO_REUSE)
    if plan == NO_REUSE:
        return body
    ids = params.get(PROMPT_TOKEN_IDS, body.get("prompt"))
    return {**body, TRANSFER_PARAMS: {**params, SIGNATURE_FIELD: sign(plan, ids, key, now_s)}}


def prefill_body(body: Mapping[str, Any], position: QueuePosition) -> dict[str, Any]:
    """Make the body that has an engine compute the prompt of another body, and one token after it.

    Args:
        body: As ``with_prompt`` has made it.
        position: In the engine's queue, from now on.
    """
    params = dict(body[TRANSFER_PARAMS])
    prompt = params.pop(PROMPT_TOKEN_IDS, None) or body["prompt"]
    prefill = {
        "model": body["model"],
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        TRANSFER_PARAMS: params,
        PROMPT_TEXT: body[PROMPT_TEXT],
    }
    return with_engine_controls(prefill, cache_salt=body.get("cache_salt"), position=position)


def without_plan(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body for an engine that runs without RagCache. A chat keeps its token ids.

    It has no priority: vLLM refuses one unless it was started to schedule by priority.
    """
    dropped = (TRANSFER_PARAMS, "priority")
    kept = {name: value for name, value in body.items() if name not in dropped}
    token_ids = body.get(TRANSFER_PARAMS, {}).get(PROMPT_TOKEN_IDS)
    return kept if token_ids is None else {**kept, TRANSFER_PARAMS: {PROMPT_TOKEN_IDS: token_ids}}


def with_number(body: Mapping[str, Any], sent: SentRequest) -> Mapping[str, Any]:
    """Return a body that names its request to the engine."""
    params = body.get(TRANSFER_PARAMS, {})
    return {**body, TRANSFER_PARAMS: {**params, SENT_FIELD: sent.to_field()}}


def without_text(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body for an engine of vLLM, which gets token ids instead of the text."""
    return {name: value for name, value in body.items() if name != PROMPT_TEXT}


def plan_of(body: Mapping[str, Any]) -> object:
    """Return a body's plan, encoded."""
    return body[TRANSFER_PARAMS]["ragcache"]


def probe_body(model: str, template: TemplateFrame) -> dict[str, Any]:
    """Make a body that asks for one token, to test whether an engine answers.

    Most prompts begin with the template's head, so the engine caches it.
    """
    return {
        "model": model,
        "prompt": list(template.head) or [0],
        "max_tokens": 1,
        "temperature": 0.0,
        PROMPT_TEXT: template.text.head(),
    }


def parse_event(data: bytes) -> list[TextDelta | Usage]:
    """Parse the data of one event.

    Raises:
        Unavailable: The event is an error of the engine, or not readable.
    """
    try:
        event = orjson.loads(data)
        if "error" in event:
            raise error_from_event(event)
        found: list[TextDelta | Usage] = [
            TextDelta(_text_of_choice(choice), choice.get("finish_reason"))
            for choice in event.get("choices", ())
        ]
        if event.get("usage"):
            found.append(Usage.model_validate(event["usage"]))
    except (ValueError, TypeError, AttributeError) as error:
        raise Unavailable(ENGINE, f"it sent an event that cannot be read: {error}") from error
    return found


def error_from_response(status: int, body: bytes) -> RagCacheError:
    """Return the error that a response other than 200 stands for."""
    try:
        parsed = orjson.loads(body)
    except ValueError:
        parsed = body[:200].decode(errors="replace")
    message = _error_message(parsed)
    if status in (400, 422):
        return InvalidInput(
            _error_field(parsed), f"is refused by the engine: {message}", "correct it"
        )
    return Unavailable(ENGINE, f"it answered {status}: {message}")


def error_from_event(event: Mapping[str, Any]) -> RagCacheError:
    """Return the error that an error event of a stream stands for."""
    return Unavailable(ENGINE, _error_message(event))


def _error_of(value: object) -> object:
    return value.get("error") if isinstance(value, dict) else value


def _error_message(value: object) -> str:
    error = _error_of(value)
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:_MAX_MESSAGE_CHARS]


def _error_field(value: object) -> str:
    error = _error_of(value)
    field = error.get("param") if isinstance(error, dict) else None
    return str(field).removeprefix("body.")[:100] if field else "request"
