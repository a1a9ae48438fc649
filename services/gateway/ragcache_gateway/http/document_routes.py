"""Documents, collections and searches."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from ragcache_gateway.chat.pipeline import to_ms
from ragcache_gateway.chat.search import retrieve
from ragcache_gateway.documents.schema import (
    MAX_PAGE,
    Chunking,
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
from ragcache_gateway.http.disconnect import unless_gone
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.upload import read_document
from ragcache_gateway.wiring import PartsOf
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


class CollectionSettings(BaseModel):
    """Settings of a collection; what is left out follows the retriever's defaults."""

    model_config = ConfigDict(extra="forbid")

    chunking: Chunking | None = None
    window: int | None = Field(
        default=None,
        ge=0,
        strict=True,
        description="Neighbouring chunks that a hit brings along, on each side.",
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
async def put_document(request: Request, parts: PartsOf) -> DocumentWritten:
    """Durable and searchable when this answers; an unchanged document is left alone."""
    document: DocumentIn = await read_document(request)
    written_at_ms = time.time_ns() // 1_000_000
    reply = await parts.retriever.upsert_document(document.to_message())
    if parts.trials is not None and reply.removed_chunks:
        parts.trials.delete(document.collection, document.id)
    removed = await parts.variants.drop(reply.removed_chunks)
    if parts.precompute is not None and reply.changed:
        parts.precompute.write(document.collection, document.id, reply.chunks, written_at_ms)
    info = document_info(reply.document)
    return DocumentWritten(**info.model_dump(), changed=reply.changed, removed_variants=removed)


@router.get("/v1/documents", summary="List documents")
async def list_documents(
    parts: PartsOf,
    collection: CollectionName = "default",
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    after: Annotated[Text, Query(description="`next` of the page before.")] = "",
) -> DocumentList:
    """One page of documents without their text, by id."""
    reply = await parts.retriever.list_documents(collection, limit, after)
    return DocumentList(
        data=[document_info(document) for document in reply.documents],
        has_more=bool(reply.next_page_token),
        next=reply.next_page_token or None,
    )


@router.get("/v1/documents/{id:path}", summary="Get a document")
async def get_document(
    id: Text,  # noqa: A002  the field's name in every other place
    parts: PartsOf,
    collection: CollectionName = "default",
) -> DocumentOut:
    """A document with its text."""
    document = await parts.retriever.get_document(collection, id)
    return DocumentOut(**document_info(document).model_dump(), text=document.text)


@router.delete("/v1/documents/{id:path}", summary="Delete a document")
async def delete_document(
    id: Text,  # noqa: A002  the field's name in every other place
    parts: PartsOf,
    collection: CollectionName = "default",
) -> DocumentDeleted:
    """Delete a document and the stored KV of its chunks."""
    reply = await parts.retriever.delete_document(collection, id)
    if parts.trials is not None:
        parts.trials.delete(collection, id)
    if parts.precompute is not None:
        parts.precompute.forget(collection, id)
    removed = await parts.variants.drop_document(collection, id, reply.removed_chunks)
    return DocumentDeleted(collection=collection, id=id, removed_variants=removed)


@router.get("/v1/collections", summary="List collections")
async def list_collections(parts: PartsOf) -> CollectionList:
    """All collections, by name."""
    collections = await parts.retriever.list_collections()
    return CollectionList(data=[collection_out(collection) for collection in collections])


@router.get("/v1/collections/{name}", summary="Get a collection")
async def get_collection(name: Text, parts: PartsOf) -> CollectionOut:
    """Settings and counts of a collection."""
    return collection_out(await parts.retriever.get_collection(name))


@router.put("/v1/collections/{name}", summary="Create a collection or change its settings")
async def put_collection(name: Text, body: CollectionSettings, parts: PartsOf) -> CollectionOut:
    """Changed chunking cuts every document of the collection anew."""
    collection = pb.Collection(name=name)
    if body.chunking is not None:
        collection.chunking.size_tokens = body.chunking.size_tokens
        collection.chunking.overlap_tokens = body.chunking.overlap_tokens
    if body.window is not None:
        collection.window = body.window
    return collection_out(await parts.retriever.put_collection(collection))


@router.post("/v1/search", summary="Search without an answer")
async def search(request: Request, body: SearchRequest, parts: PartsOf) -> SearchAnswer:
    """The hits that an answer would be drawn from."""
    found = await unless_gone(
        request.receive, retrieve(parts.retriever, body.collection, body.query, body.top_k)
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
