"""The engines' completions API: request bodies, and what events and errors say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.signature import SIGNATURE_FIELD, sign
from ragcache_wire.watched.signing_keys import SigningKeys

PART = "engine"

FIRST_TOKEN_LOGPROBS = {"logprobs": 20, "return_tokens_as_token_ids": True}
"""Fields with which an engine also returns the likeliest tokens, by their ids; 20 is vLLM's
limit."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next text of an answer. The last one has a finish reason.

    Args:
        top_logprobs: Log probabilities of the likeliest first tokens, by a text that names each
            one; None if they were not requested.
    """

    text: str
    finish_reason: str | None
    top_logprobs: dict[str, float] | None = None


class PromptTokensDetails(BaseModel):
    """How many prompt tokens the engine did not compute."""

    cached_tokens: int | None = None


class Usage(BaseModel):
    """Tokens as the engine counted them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


def completion_body(
    sampling: Mapping[str, Any],
    *,
    model: str,
    token_ids: Sequence[int],
    max_tokens: int,
    plan: ReusePlan,
    plan_keys: SigningKeys | None,
    cache_salt: str | None,
) -> dict[str, Any]:
    """Make the body for the engine's ``/v1/completions``.

    The completion always streams, so that the gateway can measure the time of the first token.

    Args:
        sampling: Fields of the client's request that the engine gets as they are.
        cache_salt: Separates this prompt in the engine's own prefix cache; None: not separated.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": transfer_params(plan, token_ids, plan_keys),
        **sampling,
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return body


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Return the JSON of a body. Run it in a thread: a long prompt takes milliseconds.

    pydantic's encoder is five times as fast as that of the standard library, and neither releases
    Python's lock.
    """
    return to_json(body)


def transfer_params(
    plan: ReusePlan, token_ids: Sequence[int], keys: SigningKeys | None
) -> dict[str, Any]:
    """Make a completion's kv_transfer_params: the plan for a prompt, signed if there are keys."""
    plan_json = plan.to_json()
    if keys is None:
        return {"ragcache": plan_json}
    signature = sign(plan_json, token_ids, keys.current()[0])
    return {"ragcache": plan_json, SIGNATURE_FIELD: signature}


def probe_body(model: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """Make a body that asks for one token, to test whether an engine answers."""
    return {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0}


def parse_event(data: bytes) -> list[TextDelta | Usage]:
    """Parse the data of one event.

    Raises:
        Unavailable: The event is an error of the engine, or not readable.
    """
    try:
        event = json.loads(data)
        if "error" in event:
            raise Unavailable(PART, _error_message(event))
        found: list[TextDelta | Usage] = [
            TextDelta(
                str(choice.get("text") or ""),
                choice.get("finish_reason"),
                _first_top_logprobs(choice.get("logprobs")),
            )
            for choice in event.get("choices", ())
        ]
        if event.get("usage"):
            found.append(Usage.model_validate(event["usage"]))
    except (ValueError, TypeError, AttributeError) as error:
        raise Unavailable(PART, f"it sent an event that cannot be read: {error}") from error
    return found


def _first_top_logprobs(logprobs: Any) -> dict[str, float] | None:
    """Return the likeliest tokens of the first one of an event."""
    if not logprobs or not logprobs.get("top_logprobs"):
        return None
    return {str(token): float(value) for token, value in logprobs["top_logprobs"][0].items()}


def error_from_response(status: int, body: bytes) -> RagCacheError:
    """Return the error that a response other than 200 stands for."""
    try:
        message = _error_message(json.loads(body))
    except ValueError:
        message = body[:200].decode(errors="replace")
    if status in (400, 422):
        return InvalidInput("request", f"is refused by the engine: {message}", "correct it")
    return Unavailable(PART, f"it answered {status}: {message}")


def _error_message(value: object) -> str:
    error = value.get("error") if isinstance(value, dict) else value
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:500]
