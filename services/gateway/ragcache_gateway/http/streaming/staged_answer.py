"""A stream that begins with what happens before the first token.

Its response begins before the answer is known to exist. So what fails later is an event, not an
HTTP status.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_gateway.documents.retriever_errors import to_rest_error
from ragcache_gateway.explain.progress import AnyStageEvent, Progress
from ragcache_gateway.http.answer_stream import encode_event, write_answer
from ragcache_gateway.http.errors import to_http
from ragcache_gateway.http.middleware.request_span import record_refusal
from ragcache_gateway.http.streaming.client_writer import ClientWriter
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.question import Question
from ragcache_gateway.pipeline.steps import answer_question

STAGE_EVENT: Final = "ragcache.stage"
"""Name of the events before the first token. Events of the answer have none."""


async def write_staged(
    services: ChatServices,
    question: Question,
    stack: AsyncExitStack,
    client: ClientWriter,
    *,
    include_usage: bool,
) -> None:
    """Write stages until the first token, then the answer.

    Args:
        stack: Gets what the answer comes from.
    """

    def tell(event: AnyStageEvent) -> None:
        client.write(f"event: {STAGE_EVENT}\n".encode() + encode_event(event.model_dump()))

    progress = Progress(tell, question.started)
    try:
        answer = await answer_question(services, replace(question, progress=progress), stack)
    except RagCacheError as error:
        record_refusal(error)
        if isinstance(error, Unavailable):
            services.metrics.upstream_failures.labels(error.component).inc()
        client.write(encode_event(to_http(to_rest_error(error)).body))
        return
    finally:
        # Guesses end when the stack closes, after the end of the response.
        progress.end()
    await write_answer(services, answer, client, include_usage=include_usage)
