"""Each route that changes or reads documents has an action of the audit log."""

from __future__ import annotations

from fastapi.routing import APIRoute

from ragcache_core.access.audit import CHANGES, AuditAction, action_of
from ragcache_core.access.caller import Scope
from ragcache_core.access.endpoints import allowed_scopes
from ragcache_gateway.app import _ROUTES

NO_DOCUMENTS = {
    "/v1/cache",
    "/v1/cache/tree",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/{name:path}",
    "/v1/operations/{id}",
    "/v1/quality",
    "/v1/rerank",
    "/v1/status",
    "/v1/usage",
}
"""Routes that show no document: they are recorded only if they are refused."""


def test_a_new_route_is_recorded_or_named_here() -> None:
    found: dict[str, AuditAction] = {}
    for routes in _ROUTES:
        for route in routes.router.routes:
            assert isinstance(route, APIRoute)
            for method in route.methods:
                path = route.path.replace("{id:path}", "a/b").replace("{name}", "a")
                action = action_of(method, path.replace("{request_id}", "chatcmpl-1"))
                found[f"{method} {route.path}"] = action
                is_open = not allowed_scopes(method, path)
                if action is AuditAction.OTHER and not is_open:
                    assert route.path in NO_DOCUMENTS, f"{method} {route.path}"
                is_change = method != "GET" and Scope.WRITE in allowed_scopes(method, path)
                if is_change:
                    assert action in CHANGES, f"{method} {route.path}"
    assert set(AuditAction) - set(found.values()) == set(), "no action is left over"
