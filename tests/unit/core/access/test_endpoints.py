"""Paths: their scope and their port."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.caller import Scope
from ragcache_core.access.endpoints import is_on_ask_port, needed_scope, plain_path


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
        ("/v1/collections/docs", Scope.WRITE, False),
        ("/v1/backup", Scope.ADMIN, False),
        ("/v1/status", Scope.ADMIN, False),
        ("/v1/quality/report", Scope.ADMIN, False),
        ("/v1/chat/completions/", Scope.ADMIN, False),
        ("//v1/chat/completions", Scope.ADMIN, False),
    ],
)
def test_a_path_has_a_scope_and_a_port(path: str, scope: Scope | None, on_ask_port: bool) -> None:
    assert needed_scope(path) == scope
    assert is_on_ask_port(path) == on_ask_port


@given(st.text())
def test_an_unknown_path_is_closed(path: str) -> None:
    assert needed_scope(f"/v1/new{path}") is Scope.ADMIN
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
