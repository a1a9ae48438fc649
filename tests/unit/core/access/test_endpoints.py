"""Paths: their scope and their port."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.caller import Scope
from ragcache_core.access.endpoints import allowed_scopes, is_on_ask_port, plain_path


@pytest.mark.parametrize(
    ("path", "scope", "on_ask_port"),
    [
        ("/health", None, True),
        ("/healthz", None, True),
        ("/readyz", None, True),
        ("/metrics", None, False),
        ("/v1/chat/completions", Scope.ASK, True),
        ("/v1/models/smollm2", Scope.ASK, True),
        ("/v1/search", Scope.ASK, True),
        ("/v1/documents", Scope.WRITE, False),
        ("/v1/documents:batch", Scope.WRITE, False),
        ("/v1/documents/a/b.md", Scope.WRITE, False),
        ("/v1/operations/7c0e", Scope.WRITE, False),
        ("/v1/collections/docs", Scope.WRITE, False),
        ("/v1/backup", Scope.ADMIN, False),
        ("/v1/status", Scope.ADMIN, False),
        ("/v1/quality/report", Scope.ADMIN, False),
        ("/v1/chat/completions/", Scope.ADMIN, False),
        ("//v1/chat/completions", Scope.ADMIN, False),
    ],
)
def test_a_path_has_a_scope_and_a_port(path: str, scope: Scope | None, on_ask_port: bool) -> None:
    assert allowed_scopes("POST", path) == (() if scope is None else (scope,))
    assert is_on_ask_port(path) == on_ask_port


VIEWED = ["/v1/status", "/v1/cache", "/v1/cache/tree", "/v1/quality"]


@pytest.mark.parametrize("path", VIEWED)
def test_the_state_is_read_with_view_and_changed_with_admin(path: str) -> None:
    assert allowed_scopes("GET", path) == (Scope.VIEW,)
    assert allowed_scopes("PUT", path) == (Scope.ADMIN,)


@pytest.mark.parametrize("path", ["/v1/collections", "/v1/collections/hr"])
def test_collections_are_viewed_and_no_documents(path: str) -> None:
    assert allowed_scopes("GET", path) == (Scope.WRITE, Scope.VIEW)
    for method in ("PUT", "PATCH", "DELETE", "POST"):
        assert allowed_scopes(method, path) == (Scope.WRITE,)
    assert allowed_scopes("GET", "/v1/documents/a") == (Scope.WRITE,)
    assert allowed_scopes("GET", "/v1/documents") == (Scope.WRITE,)


@given(st.text())
def test_an_unknown_path_is_closed(path: str) -> None:
    assert allowed_scopes("GET", f"/v1/new{path}") == (Scope.ADMIN,)
    assert not is_on_ask_port(f"/v1/new{path}")


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1//models", "/v1/models"),
        ("//v1/models", "/v1/models"),
        ("///v1///chat/completions", "/v1/chat/completions"),
        ("//healthz", "/healthz"),
        ("/v1/documents/https://example.com/a", "/v1/documents/https://example.com/a"),
        ("/v1/documents//srv/a.md", "/v1/documents//srv/a.md"),
        ("//", "/"),
        ("", ""),
    ],
)
def test_slashes_after_a_base_url_are_one(path: str, plain: str) -> None:
    assert plain_path(path) == plain
