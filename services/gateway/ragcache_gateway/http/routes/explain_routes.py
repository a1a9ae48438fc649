"""Route of the explanations of answers."""

from __future__ import annotations

from fastapi import APIRouter

from ragcache_core.access.caller import Scope
from ragcache_core.errors import NotFound
from ragcache_gateway.explain.explanation import explain
from ragcache_gateway.explain.recent_answers import MAX_ANSWERS
from ragcache_gateway.explain.schema import Explanation
from ragcache_gateway.http.openapi import ERRORS
from ragcache_gateway.http.services import Asking, Services

router = APIRouter(tags=["answers"], responses=ERRORS)


@router.get("/v1/requests/{request_id}", summary="Explain where an answer's KV came from")
async def explain_request(services: Services, caller: Asking, request_id: str) -> Explanation:
    """Return the outcome, the tier and the reason of each chunk of a recent answer's prompt.

    A caller sees answers of its own tenant; one with the scope admin sees all. Each replica of the
    gateway knows its own answers.
    """
    answered = services.chat.recent_answers.find(
        request_id, caller.tenant, of_any_tenant=caller.may(Scope.ADMIN)
    )
    if answered is None:
        raise NotFound(
            "request",
            request_id,
            f"explain one of the last {MAX_ANSWERS} answers of the gateway that gave it: each "
            "replica knows its own. Or ask again with ragcache.explain: true",
        )
    return explain(answered)
