"""Routes of collections."""

from __future__ import annotations

from fastapi import APIRouter

from ragcache_gateway.documents.schema import (
    CollectionDeleted,
    CollectionIn,
    CollectionList,
    CollectionOut,
    collection_out,
)
from ragcache_gateway.documents.text_type import Text
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.services import Services

router = APIRouter(tags=["collections"], responses={**ERRORS, **UPSTREAM_ERRORS})


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
    """New chunk sizes prepare every document again in the background (`remake`)."""
    return collection_out(await services.documents.put_collection(body.to_message(name)))


@router.delete("/v1/collections/{name}", summary="Delete a collection with all its documents")
async def delete_collection(name: Text, services: Services) -> CollectionDeleted:
    """Delete the documents and the stored KV of their chunks."""
    documents, removed = await services.documents.delete_collection(name)
    return CollectionDeleted(name=name, documents=documents, removed_variants=removed)
