"""Routes of documents, collections and searches."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from ragcache_gateway.chat.accounting import to_ms
from ragcache_gateway.chat.search import search_to_final_stage
from ragcache_gateway.documents.schema import (
    MAX_PAGE,
    ChunkSizes,
    CollectionList,
    CollectionOut,
    DocumentDeleted,
    DocumentIn,
    DocumentList,
    DocumentOut,
    DocumentWritten,
    SearchAnswer,
    SearchRequest,
    SearchTiming,
    collection_out,
    document_info,
    hit_out,
)
from ragcache_gateway.documents.text_type import Text
from ragcache_gateway.http.disconnect import cancel_on_disconnect
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.services import Services
from ragcache_gateway.http.upload import read_document
from ragcache_wire.v1 import retriever_pb2 as pb

router = APIRouter(tags=["documents"], responses={**ERRORS, **UPSTREAM_ERRORS})

CollectionName = Annotated[Text, Query(description="The collection the documents are in.")]

_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {
            "type": "string",
            "format": "binary",
            "description": "A .txt, .md or .markdown file in UTF-8.",
        },
        "id": {"type": "string", "description": "Left out: the file's name."},
        "collection": {"type": "string", "default": "default"},
        "title": {"type": "string"},
        "content_type": {"type": "string", "enum": ["text", "markdown"]},
        "metadata": {"type": "string", "description": "A JSON object of texts."},
    },
}


class CollectionIn(BaseModel):
    """Settings of a collection; the retriever has defaults for those left out."""

    model_config = ConfigDict(extra="forbid")

    chunking: ChunkSizes | None = None
    window: int | None = Field(
        default=None,
        ge=0,
        strict=True,
        description="Neighbouring chunks that are returned with a hit, on each side.",
    )


@router.post(
    "/v1/documents",
    summary="Insert or replace a document",
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
async def put_document(request: Request, services: Services) -> DocumentWritten:
    """The document is durable and searchable when this answers. An unchanged one is kept as is."""
    document: DocumentIn = await read_document(request)
    reply, removed = await services.documents.write(document.to_message())
    info = document_info(reply.document)
    return DocumentWritten(**info.model_dump(), changed=reply.changed, removed_variants=removed)


@router.get("/v1/documents", summary="List documents")
async def list_documents(
    services: Services,
    collection: CollectionName = "default",
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    after: Annotated[Text, Query(description="`next` of the previous page.")] = "",
) -> DocumentList:
    """Return one page of documents without their text, by id."""
    reply = await services.retriever.list_documents(collection, limit, after)
    return DocumentList(
        data=[document_info(document) for document in reply.documents],
        has_more=bool(reply.next_page_token),
        next=reply.next_page_token or None,
    )


@router.get("/v1/documents/{id:path}", summary="Get a document")
async def get_document(
    id: Text,  # noqa: A002  the field's name in the REST API
    services: Services,
    collection: CollectionName = "default",
) -> DocumentOut:
    """Return a document with its text."""
    document = await services.retriever.get_document(collection, id)
    return DocumentOut(**document_info(document).model_dump(), text=document.text)


@router.delete("/v1/documents/{id:path}", summary="Delete a document")
async def delete_document(
    id: Text,  # noqa: A002  the field's name in the REST API
    services: Services,
    collection: CollectionName = "default",
) -> DocumentDeleted:
    """Delete a document and the stored KV of its chunks."""
    removed = await services.documents.delete(collection, id)
    return DocumentDeleted(collection=collection, id=id, removed_variants=removed)


@router.get("/v1/collections", summary="List collections")
async def list_collections(services: Services) -> CollectionList:
    """Return all collections, by name."""
    collections = await services.retriever.list_collections()
    return CollectionList(data=[collection_out(collection) for collection in collections])


@router.get("/v1/collections/{name}", summary="Get a collection")
async def get_collection(name: Text, services: Services) -> CollectionOut:
    """Return settings and counts of a collection."""
    return collection_out(await services.retriever.get_collection(name))


@router.put("/v1/collections/{name}", summary="Create a collection or change its settings")
async def put_collection(name: Text, body: CollectionIn, services: Services) -> CollectionOut:
    """New chunk sizes split every document of the collection again."""
    collection = pb.Collection(name=name)
    if body.chunking is not None:
        collection.chunking.size_tokens = body.chunking.size_tokens
        collection.chunking.overlap_tokens = body.chunking.overlap_tokens
    if body.window is not None:
        collection.window = body.window
    return collection_out(await services.documents.put_collection(collection))


@router.post("/v1/search", summary="Search without an answer")
async def search(request: Request, body: SearchRequest, services: Services) -> SearchAnswer:
    """Return the hits that an answer would use."""
    found = await cancel_on_disconnect(
        request.receive,
        search_to_final_stage(services.retriever, body.collection, body.query, body.top_k),
    )
    return SearchAnswer(
        data=[hit_out(hit) for hit in found.hits],
        timing_ms=SearchTiming(
            retrieve=to_ms(found.retrieve_s),
            stages=found.stages,
            embed=to_ms(found.embed_s),
            search=to_ms(found.search_s),
        ),
    )
