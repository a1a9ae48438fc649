"""Route of the knowledge tree."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from ragcache_gateway.explain.tree_outline import DEFAULT_OUTLINED, MAX_OUTLINED, TreeOutline
from ragcache_gateway.http.openapi import ERRORS
from ragcache_gateway.http.services import Services

router = APIRouter(tags=["status"], responses=ERRORS)

MaxNodes = Annotated[int, Query(ge=1, le=MAX_OUTLINED, description="Most nodes to return.")]


@router.get("/v1/cache/tree", summary="The most used chunks, and in which tiers their KV is")
async def cache_tree(services: Services, limit: MaxNodes = DEFAULT_OUTLINED) -> TreeOutline:
    """Return the hottest nodes of this gateway's knowledge tree, with all nodes before them."""
    return await services.tree_reader.read(limit)
