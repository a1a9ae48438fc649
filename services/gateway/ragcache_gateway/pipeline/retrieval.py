"""The search for the chunks of a question."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ragcache_core.errors import RagCacheError
from ragcache_gateway.chat.client_passages import passages_found
from ragcache_gateway.chat.completion_schema import CompletionRequest
from ragcache_gateway.chat.schema import ChatRequest
from ragcache_gateway.chat.search import SearchResult, no_search, search_to_final_stage
from ragcache_gateway.chat.search_query import QueryWriter
from ragcache_gateway.documents.retriever_errors import to_rest_error
from ragcache_gateway.documents.search_schema import SearchOptions
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.question import Question, text_field
from ragcache_gateway.speculation.interim_stage import InterimStage
from ragcache_wire.tracing import Span


@dataclass(frozen=True, slots=True)
class RetrievedQuestion:
    """A question with the chunks that the retriever found for it."""

    question: Question
    search: SearchResult


async def retrieve(
    services: ChatServices,
    question: Question,
    on_interim_stage: Callable[[InterimStage], None] | None = None,
) -> RetrievedQuestion:
    """Search the collection for the question, or take the passages that it brings.

    Errors name fields of the request.

    Args:
        on_interim_stage: Gets every stage before the final one.
    """
    if question.passages is not None:
        return RetrievedQuestion(question, passages_found(question.passages))
    if not question.retrieves:
        return RetrievedQuestion(question, no_search())
    options = question.request.ragcache
    queries = QueryWriter(
        services.model,
        services.prompts,
        services.engines,
        question.conversation,
        options.collection,
        question.caller,
    )
    with services.tracer.start_step("retrieve") as span, span.current():
        query = await queries.first(options.rewrite or services.default_rewrite)
        try:
            search = await _search(services, question, queries, query, on_interim_stage, span)
        except RagCacheError as error:
            raise to_rest_error(error, _rest_fields(question.request)) from error
    return RetrievedQuestion(question, search)


async def _search(
    services: ChatServices,
    question: Question,
    queries: QueryWriter,
    query: str,
    on_interim_stage: Callable[[InterimStage], None] | None,
    span: Span,
) -> SearchResult:
    """Search for a query, and for those that the model writes after it."""
    options = question.request.ragcache
    began = time.perf_counter()
    search = await search_to_final_stage(
        services.retriever,
        options.to_search(query, question.caller, "ragcache"),
        on_interim_stage=on_interim_stage,
        progress=question.progress,
    )
    if services.speculator is not None:
        services.speculator.search_ended(options.collection, search.retrieve_s)
    while len(search.queries) < options.max_searches:
        another = await queries.next(search)
        if another is None:
            break
        began_s = time.perf_counter() - began
        found = await search_to_final_stage(
            services.retriever,
            options.to_search(another, question.caller, "ragcache"),
            progress=question.progress,
        )
        search = search.extended(found, began_s)
        span.event("search", hits=len(search.hits))
    span.set(stages=search.num_stages, hits=len(search.hits))
    return search


def _rest_fields(request: ChatRequest | CompletionRequest) -> dict[str, str]:
    options = {name: f"ragcache.{name}" for name in SearchOptions.model_fields}
    return {"query": text_field(request), **options}
