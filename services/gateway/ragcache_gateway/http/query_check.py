"""Refuses query parameters that a route does not have, so that none is ignored without a word."""

from __future__ import annotations

from typing import Final

from fastapi import Depends, Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute

from ragcache_core.errors import InvalidInput

_IGNORED: Final = frozenset({"api-version"})
"""Parameters that clients of Azure add to every request."""


def _known_parameters(route: APIRoute) -> frozenset[str]:
    flat = get_flat_dependant(route.dependant)  # codespell:ignore dependant
    return frozenset(one.alias for one in flat.query_params)


async def check_query(request: Request) -> None:
    """Refuse a query parameter that the request's route does not have. Raises InvalidInput."""
    if not request.scope["query_string"]:
        return
    known = _known_parameters(request.scope["route"])
    for name in request.query_params:
        if name not in known | _IGNORED:
            fix = f"send {' or '.join(sorted(known))}" if known else "leave it out"
            problem = f"is no query parameter of {request.url.path[:100]}"
            raise InvalidInput(name[:100], problem, fix)


CHECKED_QUERY: Final = Depends(check_query)
"""Dependency of every route of the REST API."""
