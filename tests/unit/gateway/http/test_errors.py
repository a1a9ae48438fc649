"""Errors as HTTP responses in OpenAI's format."""

from __future__ import annotations

import pytest

from ragcache_core.errors import (
    InvalidInput,
    NotFound,
    RagCacheError,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from ragcache_core.scheduling.admission import RefusalCode
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.http.errors import from_status, to_http, value_path


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidInput("a.b", "is odd", "fix it"), 400, "invalid_value"),
        (TooLarge("body", "is over", "send less"), 413, "too_large"),
        (NotFound("document", "x", "list them"), 404, "document_not_found"),
        (Unavailable("engine", "is away", 2.5), 503, "engine_unavailable"),
        (Unauthenticated("token", "is not signed", "set it"), 503, "platform_key_refused"),
        (Refused(RefusalCode.POOL_FULL, "busy", 3.0), 429, "too_many_requests"),
        (Refused(RefusalCode.DEADLINE_PASSED, "late", 3.0, "f"), 504, "deadline_passed"),
        (Refused(RefusalCode.QUOTA, "used up", 9.0, is_predicted=False), 429, "quota_exceeded"),
        (RagCacheError("odd"), 500, "internal_error"),
    ],
)
def test_every_error_has_openais_shape(error: RagCacheError, status: int, code: str) -> None:
    http = to_http(error)
    assert http.status == status
    assert http.body["error"]["code"] == code
    assert set(http.body["error"]) == {"message", "type", "param", "code"}
    assert str(error) in http.body["error"]["message"]
    assert ("Retry-After" in http.headers) == (status in (429, 503, 504))


def test_only_a_predicted_wait_is_bounded() -> None:
    day_s = 24 * 3600
    known = Refused(RefusalCode.QUOTA, "used up", day_s, is_predicted=False)
    assert day_s <= int(to_http(known).headers["Retry-After"]) <= day_s + 1
    assert int(to_http(Refused(RefusalCode.POOL_FULL, "busy", day_s)).headers["Retry-After"]) <= 60


@pytest.mark.parametrize("status", [400, 404, 405, 415])
def test_an_error_of_routing_has_openais_shape(status: int) -> None:
    http = from_status(status, "GET", "/x", "detail")
    assert http.status == status
    assert http.body["error"]["message"]


def test_paths_of_values_are_written_as_a_client_writes_them() -> None:
    assert value_path(("body", "messages", 0, "content", "~list", 1, "text")) == (
        "messages[0].content[1].text"
    )
    assert value_path(("query", "limit")) == "limit"
    assert value_path(("body",)) == ""
