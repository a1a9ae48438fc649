"""The route of searches without an answer."""

from __future__ import annotations

from fastapi import APIRouter, Request

from ragcache_gateway.audit.notes import note_collection, note_documents
from ragcache_gateway.chat.search import search_to_final_stage
from ragcache_gateway.documents.search_schema import (
    SearchAnswer,
    SearchRequest,
    SearchTiming,
    hit_out,
    stage_out,
)
from ragcache_gateway.explain.explanation import to_ms
from ragcache_gateway.http.disconnect import cancel_on_disconnect
from ragcache_gateway.http.json_body import JsonRoute
from ragcache_gateway.http.openapi import ERRORS, UPSTREAM_ERRORS
from ragcache_gateway.http.services import Asking, Services
from ragcache_gateway.telemetry.spans import record_reading

router = APIRouter(route_class=JsonRoute, tags=["search"], responses={**ERRORS, **UPSTREAM_ERRORS})


@router.post("/v1/search", summary="Search without an answer")
async def search(
    request: Request, body: SearchRequest, services: Services, caller: Asking
) -> SearchAnswer:
    """Return the hits that an answer would use, with the scores of each part of the search."""
    note_collection(body.collection)
    caller.check_collection(body.collection)
    record_reading(services.chat.tracer, body.query)
    wanted = body.to_search(body.query, caller)
    found = await cancel_on_disconnect(
        request.receive,
        search_to_final_stage(services.retriever, wanted, keeps_stages=body.stages),
    )
    note_documents(body.collection, (hit.chunk.document_id for hit in found.hits))
    return SearchAnswer(
        data=[hit_out(hit) for hit in found.hits],
        stages=[stage_out(stage) for stage in found.kept_stages] if body.stages else None,
        timing_ms=SearchTiming(
            retrieve=to_ms(found.retrieve_s),
            stages=found.num_stages,
            embed=to_ms(found.embed_s),
            search=to_ms(found.search_s),
        ),
    )
