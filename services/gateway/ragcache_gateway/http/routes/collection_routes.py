"""Routes of collections."""

from __future__ import annotations

from fastapi import APIRouter

from ragcache_gateway.audit.notes import note_counts
from ragcache_gateway.documents.schema import (
    CollectionDeleted,
    CollectionIn,
    CollectionList,
    CollectionOut,
    collection_out,
)
from ragcache_gateway.http.json_body import JsonRoute
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.services import Asking, Services
from ragcache_wire.rest_fields.fields import Text

router = APIRouter(
    route_class=JsonRoute, tags=["collections"], responses={**ERRORS, **UPSTREAM_ERRORS}
)


@router.get("/v1/collections", summary="List collections")
async def list_collections(services: Services, caller: Asking) -> CollectionList:
    """Return the collections that the caller's key allows, by name."""
    collections = await services.retriever.list_collections()
    return CollectionList(
        data=[collection_out(one) for one in collections if caller.may_use(one.name)]
    )


@router.get("/v1/collections/{name}", summary="Get a collection")
async def get_collection(name: Text, services: Services, caller: Asking) -> CollectionOut:
    """Return settings and counts of a collection."""
    caller.check_collection(name)
    return collection_out(await services.retriever.get_collection(name))


@router.put("/v1/collections/{name}", summary="Create a collection or replace its settings")
async def put_collection(
    name: Text, body: CollectionIn, services: Services, caller: Asking
) -> CollectionOut:
    """Settings that are left out get the platform's defaults.

    New chunk sizes prepare every document again in the background (`remake`).
    """
    caller.check_collection(name)
    message = body.to_message(name)
    return collection_out(await services.documents.put_collection(message, keep_unset=False))


@router.patch("/v1/collections/{name}", summary="Create a collection or change some settings")
async def patch_collection(
    name: Text, body: CollectionIn, services: Services, caller: Asking
) -> CollectionOut:
    """Settings that are left out stay as they are."""
    caller.check_collection(name)
    message = body.to_message(name)
    return collection_out(await services.documents.put_collection(message, keep_unset=True))


@router.delete("/v1/collections/{name}", summary="Delete a collection with all its documents")
async def delete_collection(name: Text, services: Services, caller: Asking) -> CollectionDeleted:
    """Delete the documents and the stored KV of their chunks."""
    caller.check_collection(name)
    documents, removed = await services.documents.delete_collection(name)
    note_counts(deleted=documents)
    return CollectionDeleted(name=name, documents=documents, removed_variants=removed)
