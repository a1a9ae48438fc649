"""Translates errors across gRPC: core errors to statuses in a server, and back in a client."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import grpc

from ragcache_core.errors import (
    InvalidInput,
    NotFound,
    Overloaded,
    RagCacheError,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from ragcache_wire.peers.certificates import FIX, VARIABLE

DETAIL_KEY = "ragcache-error-bin"
"""Trailing metadata with the fields of an error, from which a client raises the same error."""

RETRY_AFTER_S = 1.0
"""Retry delay for an error that names none."""

MAX_TEXT_BYTES = 1024
"""Most bytes of a text of an error, as JSON. From 8 KiB of trailing metadata on, gRPC ends calls at
random with RESOURCE_EXHAUSTED in place of the error. A message takes three times as much there,
and each of up to three fields takes a third more."""

_RETRYABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


class NoAnswer(Unavailable):
    """The service sent no answer in time, not even an error. It may be gone."""


def to_status(error: RagCacheError) -> tuple[grpc.StatusCode, str, dict[str, object]]:
    """Return the status code, message and fields of an error.

    Each text is at most MAX_TEXT_BYTES long, because an error may repeat what a caller has sent.
    """
    code, message, fields = _status_of(error)
    short = {name: _shortened(one) if isinstance(one, str) else one for name, one in fields.items()}
    return code, _shortened(message), short


def _status_of(error: RagCacheError) -> tuple[grpc.StatusCode, str, dict[str, object]]:
    fields: dict[str, object]
    match error:
        case InvalidInput():
            fields = {"field": error.field, "problem": error.problem, "fix": error.fix}
            kind = "too_large" if isinstance(error, TooLarge) else "invalid"
            return grpc.StatusCode.INVALID_ARGUMENT, str(error), {"type": kind, **fields}
        case Unauthenticated():
            fields = {"type": "unauthenticated", "field": error.field}
            fields |= {"problem": error.problem, "fix": error.fix}
            return grpc.StatusCode.UNAUTHENTICATED, str(error), fields
        case NotFound():
            fields = {"kind": error.kind, "name": error.name, "fix": error.fix}
            return grpc.StatusCode.NOT_FOUND, str(error), {"type": "not_found", **fields}
        case Overloaded():
            fields = {"type": "overloaded", "retry_after_s": error.retry_after_s}
            return grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), fields
        case Unavailable():
            fields = {"type": "unavailable", "retry_after_s": error.retry_after_s}
            return grpc.StatusCode.UNAVAILABLE, str(error), fields
        case _:
            return grpc.StatusCode.INTERNAL, str(error), {"type": "internal"}


def _shortened(text: str) -> str:
    """Return a text, or its beginning, as far as its JSON takes MAX_TEXT_BYTES."""
    start = text[:MAX_TEXT_BYTES]
    while len(json.dumps(start)) > MAX_TEXT_BYTES:
        start = start[: len(start) * 7 // 8]
    return text if start == text else start[:-3] + "..."


def trailing_metadata(fields: dict[str, object]) -> tuple[tuple[str, bytes], ...]:
    """Return trailing metadata with the fields of an error."""
    return ((DETAIL_KEY, json.dumps(fields).encode()),)


def from_rpc_error(service: str, error: grpc.RpcError) -> RagCacheError:
    """Return the core error of a failed call to a service."""
    code, details = _code_of(error)
    fields = _fields_of(error)
    named = _named_error(service, fields, f"{code.name.lower()}: {details}")
    if named is not None:
        return named
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # The server refused the call before it reached the service.
        return Overloaded(service, details)
    if code in _RETRYABLE:
        return NoAnswer(service, f"{code.name.lower()}: {details}{_tls_hint(details)}")
    return RagCacheError(f"the {service} failed: {code.name.lower()}: {details}")


def error_of(service: str, fields: Mapping[str, object], problem: str) -> RagCacheError:
    """Return the error whose fields ``to_status`` has made."""
    texts = {name: str(value) for name, value in fields.items()}
    return _named_error(service, texts, problem) or RagCacheError(
        f"the {service} failed: {problem}"
    )


def _tls_hint(details: str) -> str:
    """Return what to do if a connection failed because of TLS, as gRPC's text shows."""
    if "Tls handshake failed" in details or "verification check failed" in details:
        return f"; {FIX}"
    if "failed to connect" in details and "Socket closed" in details:
        return f"; if the {VARIABLE} of the two differ, {FIX}"
    return ""


def _named_error(service: str, fields: dict[str, str], problem: str) -> RagCacheError | None:
    """Return the error that the fields name, or None."""
    match fields.get("type"):
        case "too_large":
            return TooLarge(*_texts(fields, "field", "problem", "fix"))
        case "invalid":
            return InvalidInput(*_texts(fields, "field", "problem", "fix"))
        case "unauthenticated":
            return Unauthenticated(*_texts(fields, "field", "problem", "fix"))
        case "not_found":
            return NotFound(*_texts(fields, "kind", "name", "fix"))
        case ("unavailable" | "overloaded") as kind:
            error = Overloaded if kind == "overloaded" else Unavailable
            return error(service, problem, _seconds(fields.get("retry_after_s", "")))
    return None


def _texts(fields: dict[str, str], *names: str) -> list[str]:
    # A service of another version may leave a field out.
    return [fields.get(name, "") for name in names]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return RETRY_AFTER_S
    return seconds if math.isfinite(seconds) and seconds >= 0 else RETRY_AFTER_S


def _code_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    # Every error that a call raises is also a grpc.Call, which its base class does not declare.
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = error.details() if hasattr(error, "details") else str(error)
    return code, str(details)


def _fields_of(error: grpc.RpcError) -> dict[str, str]:
    metadata: Iterable[Any] = ()
    if hasattr(error, "trailing_metadata"):
        metadata = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == DETAIL_KEY:
            try:
                fields = json.loads(value)
            except ValueError:
                return {}
            return {str(k): str(v) for k, v in fields.items()} if isinstance(fields, dict) else {}
    return {}
