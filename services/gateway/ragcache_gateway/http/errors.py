"""Translates errors to HTTP responses in OpenAI's format."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from starlette.responses import JSONResponse

from ragcache_core.access.caller import NotAllowed, Scope
from ragcache_core.cost.retry_after import jitter
from ragcache_core.errors import (
    InvalidInput,
    NotFound,
    RagCacheError,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.shown_address import shown

M = TypeVar("M", bound=BaseModel)

UNION_TAG = "~"
"""First character of the schema's union tags, which pydantic adds to paths. No field has it."""

_SHOWN_CHARS = 60

_KEY_CHANGE_S = 5.0
"""When all parts may have the same signing keys again."""

_PROBLEMS = {
    "missing": ("is missing", "add it"),
    "extra_forbidden": ("is no field of this request", "remove it or correct it"),
    "model_attributes_type": ("is not a JSON object", "send a JSON object"),
    "model_type": ("is not a JSON object", "send a JSON object"),
    "dict_type": ("is not a JSON object", "send a JSON object"),
    "union_tag_not_found": ("is neither a string nor a list", "send one of these"),
    "string_unicode": ("is not valid Unicode", "send whole characters"),
}
"""Problem and fix for the types of pydantic errors whose message has no fix."""

_FIXES = {
    "greater_than": "send more than {gt}",
    "greater_than_equal": "send {ge} or more",
    "less_than": "send less than {lt}",
    "less_than_equal": "send {le} or less",
    "string_too_long": "send at most {max_length} characters",
    "string_too_short": "send at least {min_length} characters",
    "too_long": "send at most {max_length} of them",
    "too_short": "send at least {min_length} of them",
    "value_error": "send another value",
}
"""The fix for values out of range."""


class ErrorDetail(BaseModel):
    """An error: the message names the field and the fix."""

    message: str
    type: str = Field(description="Class of the error, as OpenAI names it.")
    param: str | None = Field(description="Path of the wrong value, if there is one.")
    code: str | None


class ErrorBody(BaseModel):
    """Body of an error response, and of an error event in a stream."""

    error: ErrorDetail


def stopping() -> Unavailable:
    """Return the error of a request that a stop of the gateway has cancelled."""
    return Unavailable("gateway", "it has stopped before the answer was complete")


class NotAuthenticated(RagCacheError):
    """A request without a valid key. The error never has what the client sent."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"Authorization: the API key {problem}; send `Authorization: Bearer KEY` with a key of "
            "this gateway"
        )


class InvalidToken(NotAuthenticated):
    """A JSON Web Token that is not valid.

    Args:
        problem: What is wrong with it, without anything of the token.
    """

    def __init__(self, problem: str) -> None:
        RagCacheError.__init__(
            self, f"Authorization: the token {problem}; get another one from your issuer"
        )


class MissingScope(RagCacheError):
    """A key without the scope that a path needs.

    Args:
        name: Name of the key.
        allowed: The scopes that would do, one is enough.
    """

    def __init__(self, name: str, allowed: Sequence[Scope]) -> None:
        scopes = " or ".join(allowed)
        super().__init__(
            f"Authorization: the key {name!r} lacks the scope {scopes}; use another key"
        )
        self.scope = allowed[0]


class TooSlow(RagCacheError):
    """A body did not arrive in time.

    Args:
        time_s: The seconds that it had.
    """

    def __init__(self, time_s: float) -> None:
        super().__init__(f"body: did not arrive within {time_s:g} s; send it faster")


class Forbidden(RagCacheError):
    """A browser's request that the settings do not allow.

    Args:
        header: The header that shows it.
        value: Its value.
        setting: Field of the RagCache that would allow it.
    """

    def __init__(self, header: str, value: str, setting: str) -> None:
        super().__init__(f"{header}: {_shown(value)} is not allowed; add it to {setting}")
        self.header = header


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as an HTTP response."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Make OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def response_to(error: RagCacheError, recovery_s: float = 0.0) -> JSONResponse:
    """Convert an error to a response.

    Args:
        recovery_s: When the part that failed is expected to be up.
    """
    http = to_http(error, recovery_s)
    return JSONResponse(http.body, http.status, dict(http.headers))


def retry_headers(wait_s: float, *, is_predicted: bool = True) -> dict[str, str]:
    """Return headers that tell clients to retry after this wait, with jitter.

    Args:
        is_predicted: Bound the wait, as it may be wrong. Otherwise a second is added at most, so
            that clients do not all return together.
    """
    unit = random.random()
    jittered_s = jitter(wait_s, unit) if is_predicted else wait_s + unit
    # OpenAI's clients prefer the second header. The first one has whole seconds only.
    return {
        "Retry-After": str(math.ceil(jittered_s)),
        "Retry-After-Ms": str(math.ceil(1e3 * jittered_s)),
    }


def _refused_caller(
    error: Forbidden | NotAuthenticated | MissingScope | NotAllowed,
) -> HttpError:
    match error:
        case Forbidden():
            code = f"{error.header.lower()}_not_allowed"
            return HttpError(403, error_body(str(error), "permission_error", error.header, code))
        case InvalidToken():
            body = error_body(str(error), "invalid_request_error", "Authorization", "invalid_token")
            # Source: RFC 6750, section 3.1.
            challenge = 'Bearer realm="ragcache", error="invalid_token"'
            return HttpError(401, body, {"WWW-Authenticate": challenge})
        case NotAuthenticated():
            body = error_body(
                str(error), "invalid_request_error", "Authorization", "invalid_api_key"
            )
            return HttpError(401, body, {"WWW-Authenticate": 'Bearer realm="ragcache"'})
        case MissingScope():
            body = error_body(str(error), "permission_error", "Authorization", "missing_scope")
            challenge = (
                f'Bearer realm="ragcache", error="insufficient_scope", scope="{error.scope}"'
            )
            return HttpError(403, body, {"WWW-Authenticate": challenge})
        case NotAllowed():
            code = f"{error.field.rpartition('.')[2]}_not_allowed"
            return HttpError(403, error_body(str(error), "permission_error", error.field, code))


def to_http(error: RagCacheError, recovery_s: float = 0.0) -> HttpError:
    """Return status, body and headers for an error.

    Args:
        recovery_s: When the part that failed is expected to be up. The part may name a later time.
    """
    match error:
        case TooLarge():
            body = error_body(str(error), "invalid_request_error", error.field, "too_large")
            http = HttpError(413, body)
        case TooSlow():
            body = error_body(str(error), "timeout_error", "body", "body_timeout")
            # What is left of the body must not be read as the next request.
            http = HttpError(408, body, {"Connection": "close"})
        case InvalidInput():
            body = error_body(str(error), "invalid_request_error", error.field, "invalid_value")
            http = HttpError(400, body)
        case NotFound():
            code = f"{error.kind.replace(' ', '_')}_not_found"
            http = HttpError(404, error_body(str(error), "not_found_error", error.kind, code))
        case Forbidden() | NotAuthenticated() | MissingScope() | NotAllowed():
            http = _refused_caller(error)
        case Unavailable():
            body = error_body(
                f"{shown(str(error))}; try again",
                "service_unavailable_error",
                code=f"{error.component}_unavailable",
            )
            http = HttpError(503, body, retry_headers(max(error.retry_after_s, recovery_s)))
        case Unauthenticated():  # another part refuses this gateway's token; keys may be changing
            text = f"a part of the platform refuses this gateway: {shown(str(error))}; try again"
            body = error_body(text, "service_unavailable_error", code="platform_key_refused")
            http = HttpError(503, body, retry_headers(max(_KEY_CHANGE_S, recovery_s)))
        case Refused():
            body = error_body(shown(str(error)), error.kind, error.field, error.reason)
            headers = retry_headers(error.retry_after_s, is_predicted=error.is_predicted)
            http = HttpError(error.status, body, headers)
        case _:
            text = shown(str(error))
            http = HttpError(500, error_body(text, "server_error", code="internal_error"))
    return http


def from_status(status: int, method: str, path: str, detail: str) -> HttpError:
    """Return the error for a request that routing or parsing refused before any handler."""
    match status:
        case 404:
            message = f"path: {path} does not exist; see /openapi.json for the paths there are"
            return HttpError(404, error_body(message, "not_found_error", "path", "path_not_found"))
        case 405:
            message = (
                f"method: {path} does not take {method}; see /openapi.json for the methods it takes"
            )
            body = error_body(message, "invalid_request_error", "method", "method_not_allowed")
            return HttpError(405, body)
        case _:
            return HttpError(status, error_body(detail, "invalid_request_error"))


def from_validation(errors: Sequence[Mapping[str, Any]]) -> InvalidInput:
    """Convert the first of pydantic's errors, and add the fix."""
    error = errors[0]
    path = value_path(error["loc"]) or "body"
    kind, message, context = str(error["type"]), str(error["msg"]), error.get("ctx") or {}
    if kind == "ragcache":
        return InvalidInput(path, context["problem"], context["fix"])
    if kind in _PROBLEMS:
        problem, fix = _PROBLEMS[kind]
        if path == "body":
            fix = "send a JSON object as application/json"
        return InvalidInput(path, problem, fix)
    if kind in _FIXES:
        fix = _FIXES[kind].format(**context)
    else:
        fix = re.sub("^Input should (be|have)", "send", message)
    return InvalidInput(path, f"is {_shown(error.get('input'))}", fix)


def validate(model: type[M], fields: dict[str, Any]) -> M:
    """Validate fields. Raises InvalidInput naming the first wrong one."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise from_validation([dict(e) for e in error.errors()]) from error


def value_path(location: Sequence[int | str]) -> str:
    """Return the path of a value as a client writes it: ``messages[0].content``."""
    path = ""
    parts = list(location)
    if parts and parts[0] in ("body", "query", "path", "header"):
        del parts[0]
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(UNION_TAG):
            path += f".{part}" if path else part
    return path


def _shown(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError):
        return "not usable"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
