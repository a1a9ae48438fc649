"""Operations in the REST API: documents that were accepted and are written later."""

from __future__ import annotations

import json
from typing import Final, Literal

from pydantic import BaseModel, Field

from ragcache_gateway.documents.retriever_errors import to_rest_error
from ragcache_gateway.documents.schema import WARNINGS_HELP
from ragcache_gateway.http.errors import ErrorDetail, error_body, to_http
from ragcache_wire.clients.retriever_client import SERVICE
from ragcache_wire.status import error_of
from ragcache_wire.v1 import retriever_pb2 as pb

LATER_CHARS: Final = 1 << 18
"""Length above which the documents of a batch are written later, if the client prefers that.
Shorter ones take seconds."""

POLL_S: Final = 5
"""What `Retry-After` says to a client that waits for an operation."""

_States = Literal["pending", "done", "failed", "cancelled"]
_STATES: Final[dict[int, _States]] = {
    pb.OPERATION_STATE_PENDING: "pending",
    pb.OPERATION_STATE_DONE: "done",
    pb.OPERATION_STATE_FAILED: "failed",
    pb.OPERATION_STATE_CANCELLED: "cancelled",
}


class OperationOut(BaseModel):
    """A document that was accepted and is written later. Restarts do not lose it."""

    object: Literal["operation"] = "operation"
    id: str = Field(description="The same for the same content of the same document.")
    state: _States = Field(
        description="pending; done: durable and searchable; failed: see error; cancelled: by a "
        "later write or delete of the document."
    )
    collection: str
    document_id: str
    created_unix_ms: int
    updated_unix_ms: int
    changed: bool | None = Field(
        default=None, description="With done; false: the same document was stored already."
    )
    chunks: int | None = Field(default=None, description="With done: chunks of the document.")
    error: ErrorDetail | None = Field(default=None, description="With failed.")
    warnings: list[str] | None = Field(
        default=None, description=f"In the answer to the document. {WARNINGS_HELP}"
    )


def operation_out(operation: pb.Operation) -> OperationOut:
    """Convert an operation."""
    is_done = operation.state == pb.OPERATION_STATE_DONE
    return OperationOut(
        id=operation.id,
        state=_STATES[operation.state],
        collection=operation.collection,
        document_id=operation.document_id,
        created_unix_ms=operation.created_unix_ms,
        updated_unix_ms=operation.updated_unix_ms,
        changed=operation.changed if is_done else None,
        chunks=operation.num_chunks if is_done else None,
        error=_error(operation.error) if operation.error else None,
    )


def _error(told: str) -> ErrorDetail:
    fields = json.loads(told)
    problem = str(fields.get("message", ""))
    if fields.get("type") == "internal":
        body = error_body(problem, "server_error", code="internal")
    else:
        body = to_http(to_rest_error(error_of(SERVICE, fields, problem))).body
    return ErrorDetail(**body["error"])
