"""Route of the explanations of answers."""

from __future__ import annotations

from fastapi import APIRouter

from ragcache_core.access.caller import Scope
from ragcache_gateway.explain.schema import Explanation
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.services import Asking, Services

router = APIRouter(tags=["answers"], responses=ERRORS)


@router.get(
    "/v1/requests/{request_id}",
    summary="Explain where an answer's KV came from",
    responses=UPSTREAM_ERRORS,
)
async def explain_request(services: Services, caller: Asking, request_id: str) -> Explanation:
    """Return the outcome, the tier and the reason of each chunk of a recent answer's prompt.

    A caller sees answers of its own tenant; one with the scope admin sees all. Each replica of the
    gateway knows its own answers. 503: a worker of this replica does not answer.
    """
    sees_all = caller.may(Scope.ADMIN)
    return await services.answers.explain(request_id, caller.tenant, of_any_tenant=sees_all)
