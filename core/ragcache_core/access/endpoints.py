"""Which port serves a path, and which scopes allow it.

A path that is not named here needs the scope ``admin`` and is served on the admin port alone. So a
new route is closed until it is named.
"""

from __future__ import annotations

from typing import Final

from ragcache_core.access.caller import Scope

OPEN_PATHS: Final = frozenset({"/health", "/healthz", "/readyz", "/metrics"})
"""Paths without a key: kubelets and Prometheus call them. They show no text of a client."""

CONSOLE_PATH: Final = "/console"
"""The console's page. It and its files have no data: the page sends the key of its user."""

_ASK_PATHS: Final = frozenset(
    {
        "/openapi.json",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1/rerank",
        "/v1/responses",
        "/v1/search",
        "/v1/usage",
    }
)
_ASK_PREFIXES: Final = ("/v1/models/", "/v1/requests/")
_VIEW_PATHS: Final = frozenset({"/v1/cache", "/v1/cache/tree", "/v1/quality", "/v1/status"})
_DESCRIPTIONS: Final = frozenset({"/openapi.json", "/v1/models"})
_COLLECTION_PREFIX: Final = "/v1/collections"
_HEALTH_PATHS: Final = frozenset({"/health", "/healthz", "/readyz"})
_WRITE_PATHS: Final = frozenset({"/v1/collections", "/v1/documents", "/v1/documents:batch"})
_WRITE_PREFIXES: Final = ("/v1/collections/", "/v1/documents/", "/v1/operations/")


def plain_path(path: str) -> str:
    """Return a path without doubled slashes at its beginning and after ``/v1``.

    Clients whose base URL ends with a slash send them. Ids of documents keep theirs.
    """
    if path.startswith("//"):
        path = f"/{path.lstrip('/')}"
    return f"/v1/{path[4:].lstrip('/')}" if path.startswith("/v1//") else path


def allowed_scopes(method: str, path: str) -> tuple[Scope, ...]:
    """Return the scopes that allow a request, one is enough. None: it needs no key at all."""
    if path in OPEN_PATHS or is_console_path(path):
        return ()
    is_read = method == "GET"
    if _is_ask_path(path):
        return (Scope.ASK, Scope.VIEW) if is_read and path in _DESCRIPTIONS else (Scope.ASK,)
    if path in _WRITE_PATHS or path.startswith(_WRITE_PREFIXES):
        is_viewed = is_read and path.startswith(_COLLECTION_PREFIX)
        return (Scope.WRITE, Scope.VIEW) if is_viewed else (Scope.WRITE,)
    return (Scope.VIEW,) if is_read and path in _VIEW_PATHS else (Scope.ADMIN,)


def is_console_path(path: str) -> bool:
    """Whether a path is that of the console's page or of one of its files."""
    return path == CONSOLE_PATH or path.startswith(f"{CONSOLE_PATH}/")


def is_on_ask_port(path: str) -> bool:
    """Whether the port that clients of applications reach serves a path."""
    return path in _HEALTH_PATHS or _is_ask_path(path)


def _is_ask_path(path: str) -> bool:
    return path in _ASK_PATHS or path.startswith(_ASK_PREFIXES)
