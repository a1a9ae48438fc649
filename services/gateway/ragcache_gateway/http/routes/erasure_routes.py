"""``/v1/erasure``: what is left of a deleted document."""

from __future__ import annotations

from fastapi import APIRouter

from ragcache_gateway.documents.erasure import ErasureIn, ErasureReport
from ragcache_gateway.http.json_body import JsonRoute
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.services import Services

router = APIRouter(
    route_class=JsonRoute, tags=["documents"], responses={**ERRORS, **UPSTREAM_ERRORS}
)


@router.post("/v1/erasure", summary="Look for what is left of a deleted document")
async def check_erasure(body: ErasureIn, services: Services) -> ErasureReport:
    """Ask every shard, every engine's feed and the retriever. Nothing is changed."""
    return await services.erasure.report(body, services.platform_keys)
