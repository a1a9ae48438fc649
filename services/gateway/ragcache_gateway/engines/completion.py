"""The engine's completions: what is asked of it, and what its events say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.signature import SIGNATURE_FIELD, sign
from ragcache_gateway.chat.schema import ChatRequest, Usage
from ragcache_wire.watched.signing_keys import PlanKeys

PART = "engine"

_PASSED = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop")


@dataclass(frozen=True, slots=True)
class Piece:
    """More of the answer. finish_reason: set on the last piece."""

    text: str
    finish_reason: str | None


def completion_body(
    request: ChatRequest,
    *,
    model: str,
    token_ids: Sequence[int],
    max_tokens: int,
    plan: ReusePlan,
    plan_keys: PlanKeys | None,
    cache_salt: str | None,
) -> dict[str, Any]:
    """Body for the engine's ``/v1/completions``.

    Only what is named here reaches the engine. It always streams, so that the time of the first
    token is known. cache_salt: keeps this prompt apart in the engine's own prefix cache.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": transfer_params(plan, token_ids, plan_keys),
    }
    for name in _PASSED:
        value = getattr(request, name)
        if value is not None:
            body[name] = value
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return body


def transfer_params(
    plan: ReusePlan, token_ids: Sequence[int], keys: PlanKeys | None
) -> dict[str, Any]:
    """A completion's kv_transfer_params: the plan for the prompt token_ids, sealed if with keys."""
    said = plan.to_json()
    if keys is None:
        return {"ragcache": said}
    return {"ragcache": said, SIGNATURE_FIELD: sign(said, token_ids, keys.current()[0])}


def probe_body(model: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """Body that asks for one token, to see whether the engine answers."""
    return {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0}


def read_event(data: bytes) -> list[Piece | Usage]:
    """What one event says. Raises Unavailable for an error, or for what cannot be read."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise Unavailable(PART, _error_message(event))
        found: list[Piece | Usage] = [
            Piece(str(choice.get("text") or ""), choice.get("finish_reason"))
            for choice in event.get("choices", ())
        ]
        if event.get("usage"):
            found.append(Usage.model_validate(event["usage"]))
    except (ValueError, TypeError, AttributeError) as error:
        raise Unavailable(PART, f"it sent an event that cannot be read: {error}") from error
    return found


def refusal(status: int, body: bytes) -> RagCacheError:
    """The error behind an answer of the engine that is not 200."""
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
