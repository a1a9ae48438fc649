"""The route of operations."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from ragcache_gateway.audit.notes import note_collection, note_object
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.operation_schema import POLL_S, OperationOut, operation_out
from ragcache_gateway.http.services import Asking, Services
from ragcache_wire.rest_fields.fields import Text

router = APIRouter(tags=["documents"], responses={**ERRORS, **UPSTREAM_ERRORS})

_RETRY_AFTER: dict[str, Any] = {
    "Retry-After": {"description": "Of a pending one.", "schema": {"type": "integer"}}
}


@router.get(
    "/v1/operations/{id}",
    summary="Get what has become of a document that is written later",
    responses={200: {"headers": _RETRY_AFTER}},
)
async def get_operation(
    id: Text,  # noqa: A002  the field's name in the REST API
    services: Services,
    caller: Asking,
    response: Response,
) -> OperationOut:
    """An operation is known to its tenant alone, for a week after its end.

    Of one that is not known, send the document again: what is stored stays as it is.
    """
    note_object(id)
    operation = await services.retriever.get_operation(id, caller.tenant or "")
    note_collection(operation.collection)
    caller.check_collection(operation.collection)
    found = operation_out(operation)
    if found.state == "pending":
        response.headers["Retry-After"] = str(POLL_S)
    return found
