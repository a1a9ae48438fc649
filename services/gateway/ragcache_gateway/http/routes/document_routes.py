"""Routes of documents."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from ragcache_core.documents.formats import FORMAT_OF_SUFFIX, DocumentFormat
from ragcache_gateway.audit.notes import (
    note_collection,
    note_counts,
    note_documents,
    note_object,
)
from ragcache_gateway.documents.erasure import (
    DocumentDeleted,
    make_receipt,
)
from ragcache_gateway.documents.schema import (
    MAX_PAGE,
    DocumentList,
    DocumentOut,
    DocumentWritten,
    FileFields,
    document_info,
)
from ragcache_gateway.http.answer_stream import DONE, SIGN_OF_LIFE, encode_event
from ragcache_gateway.http.batch import BatchLimit, DocumentBatch
from ragcache_gateway.http.batch_parser import batch_parser
from ragcache_gateway.http.disconnect import EventStream, cancel_on_disconnect
from ragcache_gateway.http.middleware.request_pools import BATCH_PATH
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.operation_schema import POLL_S, OperationOut, operation_out
from ragcache_gateway.http.prefer import RESPOND_ASYNC, Prefer, prefers_async
from ragcache_gateway.http.services import Asking, Services
from ragcache_gateway.http.upload import read_document
from ragcache_wire.rest_fields.fields import Text

router = APIRouter(tags=["documents"], responses={**ERRORS, **UPSTREAM_ERRORS})

CollectionName = Annotated[Text, Query(description="The collection the documents are in.")]
DefaultCollection = Annotated[
    Text, Query(description="The collection of documents that name none themselves.")
]

_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {
            "type": "string",
            "format": "binary",
            "description": f"A file of {', '.join(FORMAT_OF_SUFFIX)}.",
        },
        "id": {"type": "string", "description": "Left out: the file's name."},
        "collection": {"type": "string", "default": "default"},
        "title": {"type": "string"},
        "content_type": {
            "type": "string",
            "description": f"One of {', '.join(DocumentFormat)} or a media type. Left out: by the "
            "file's name.",
        },
        "metadata": {
            "type": "string",
            "description": "A JSON object of texts, numbers, truth values and lists of these.",
        },
        "encoding": {
            "type": "string",
            "description": FileFields.model_fields["encoding"].description,
        },
    },
}

_BATCH_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "description": "Files. The other fields belong to the file after them. A file of JSON lines "
    "has a document per line.",
    "properties": {
        **_FORM["properties"],
        "file": {"type": "array", "items": {"type": "string", "format": "binary"}},
    },
}


@router.post(
    "/v1/documents",
    summary="Insert or replace a document",
    response_model=DocumentWritten,
    responses={
        202: {
            "model": OperationOut,
            "description": "With `Prefer: respond-async`: the document is durable, and is written "
            "later. Location has the path of the operation.",
        }
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/DocumentIn"}},
                "multipart/form-data": {"schema": _FORM},
            },
        }
    },
)
async def put_document(
    request: Request,
    services: Services,
    caller: Asking,
    collection: DefaultCollection = "default",
    prefer: Prefer = None,
) -> Any:
    """The document is durable and searchable when this answers. An unchanged one is kept as is.

    A document that takes longer to embed than a caller can wait for is refused with 413, unless the
    caller prefers an answer at once.
    """
    document = await read_document(request, collection)
    note_documents(document.fields.collection, [document.fields.id])
    caller.check_collection(document.fields.collection)
    read = await cancel_on_disconnect(request.receive, document.read(services.extractor))
    if prefers_async(prefer):
        accepted = await services.documents.submit(read.message, caller.tenant or "")
        note_object(accepted.id)
        return _accepted(operation_out(accepted), list(read.warnings))
    reply, removed = await services.documents.write(read.message)
    info = document_info(reply.document)
    return DocumentWritten(
        **info.model_dump(),
        changed=reply.changed,
        removed_variants=removed,
        warnings=list(read.warnings),
    )


def _accepted(operation: OperationOut, warnings: list[str]) -> Response:
    headers = {
        "Location": f"/v1/operations/{operation.id}",
        "Preference-Applied": RESPOND_ASYNC,
        "Retry-After": str(POLL_S),
    }
    body = operation.model_copy(update={"warnings": warnings}).model_dump_json(exclude_none=True)
    return Response(body, 202, headers, media_type="application/json")


@router.post(
    BATCH_PATH,
    summary="Insert or replace many documents",
    response_class=Response,
    responses={
        200: {
            "description": "An event for each document that is accepted, and one for each that is "
            "done or failed, as server-sent events; then the summary and `[DONE]`.",
            "content": {
                "text/event-stream": {
                    "schema": {
                        "anyOf": [
                            {"$ref": "#/components/schemas/BatchEvent"},
                            {"$ref": "#/components/schemas/BatchSummary"},
                        ]
                    }
                }
            },
        }
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/jsonl": {
                    "schema": {
                        "type": "string",
                        "description": "One document (DocumentIn) per line, in any number.",
                    }
                },
                "multipart/form-data": {"schema": _BATCH_FORM},
            },
        }
    },
)
async def put_documents(
    request: Request,
    services: Services,
    caller: Asking,
    collection: DefaultCollection = "default",
    prefer: Prefer = None,
) -> Response:
    """A document that fails stops no other. A repetition of a batch changes nothing.

    The batch stops when the client disconnects; what is done stays. With `Prefer: respond-async`
    long documents are `submitted`: durable, and written later.
    """
    note_collection(collection)
    caller.check_collection(collection)
    settings = services.settings
    content_type = request.headers.get("content-type", "")
    parser = batch_parser(content_type, collection, settings.body_max_bytes)
    await services.retriever.get_collection(collection)
    batch = DocumentBatch(
        parser,
        request.receive,
        writer=services.documents,
        extractor=services.extractor,
        caller=caller,
        limit=BatchLimit(
            settings.body_max_bytes, settings.body_timeout_s, defers_long=prefers_async(prefer)
        ),
    )
    return EventStream(_batch_events(batch), settings.send_timeout_s)


async def _batch_events(batch: DocumentBatch) -> AsyncGenerator[bytes, None]:
    async with aclosing(batch.events()) as events:
        async for event in events:
            if event is None:
                yield SIGN_OF_LIFE
            else:
                yield encode_event(event.model_dump(exclude_none=True))
    yield DONE


@router.get("/v1/documents", summary="List documents")
async def list_documents(
    services: Services,
    caller: Asking,
    collection: CollectionName = "default",
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    after: Annotated[Text, Query(description="`next` of the previous page.")] = "",
) -> DocumentList:
    """Return one page of documents without their text, by id."""
    note_collection(collection)
    caller.check_collection(collection)
    reply = await services.retriever.list_documents(collection, limit, after)
    note_counts(listed=len(reply.documents))
    return DocumentList(
        data=[document_info(document) for document in reply.documents],
        has_more=bool(reply.next_page_token),
        next=reply.next_page_token or None,
    )


@router.get("/v1/documents/{id:path}", summary="Get a document")
async def get_document(
    id: Text,  # noqa: A002  the field's name in the REST API
    services: Services,
    caller: Asking,
    collection: CollectionName = "default",
) -> DocumentOut:
    """Return a document with its text."""
    note_documents(collection, [id])
    caller.check_collection(collection)
    document = await services.retriever.get_document(collection, id)
    return DocumentOut(**document_info(document).model_dump(), text=document.text)


@router.delete("/v1/documents/{id:path}", summary="Delete a document")
async def delete_document(
    id: Text,  # noqa: A002  the field's name in the REST API
    services: Services,
    caller: Asking,
    collection: CollectionName = "default",
) -> DocumentDeleted:
    """Delete a document and the stored KV of its chunks."""
    note_documents(collection, [id])
    caller.check_collection(collection)
    deleted = await services.documents.delete(collection, id)
    return DocumentDeleted(
        collection=collection,
        id=id,
        removed_variants=deleted.removed,
        receipt=make_receipt(collection, id, deleted, services.platform_keys),
    )
