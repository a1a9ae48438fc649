"""An answer as a stream of server-sent events.

The gateway parses the first event and the last ones, and passes those between them on as they are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

import orjson

from ragcache_core.errors import RagCacheError
from ragcache_gateway.audit.notes import note_status
from ragcache_gateway.documents.retriever_errors import to_rest_error
from ragcache_gateway.engines.completion_stream import Completion
from ragcache_gateway.explain.progress import AnyStageEvent, Progress
from ragcache_gateway.http.client_writer import ClientWriter
from ragcache_gateway.http.errors import stopping, to_http
from ragcache_gateway.http.middleware.request_span import record_refusal
from ragcache_gateway.pipeline.account import account
from ragcache_gateway.pipeline.answer import Answer
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.pipeline.metering import settle
from ragcache_gateway.pipeline.plain_completion import PlainCompletion
from ragcache_gateway.pipeline.question import Question
from ragcache_gateway.pipeline.relay import relay_answer, relay_events
from ragcache_gateway.pipeline.steps import answer_question
from ragcache_gateway.responses.request_schema import ResponseRequest
from ragcache_gateway.responses.response_events import ResponseEvents, failure_event
from ragcache_gateway.responses.response_object import head_of, response_usage

DONE = b"data: [DONE]\n\n"
"""The end of a stream, as OpenAI marks it."""

_OPTIONAL: Final = ("inline_citations", "explanation")
"""Fields of the last event that only some requests ask for."""

SIGN_OF_LIFE = b": waiting\n\n"
"""A comment, which clients ignore."""


async def write_answer(
    services: ChatServices, answer: Answer, client: ClientWriter, *, include_usage: bool
) -> None:
    """Write the events of an answer: citations in the first, timing and cache use in the last.

    The events between them are the engine's own. Without include_usage the last chunk is the one
    with the finish reason, because a client that did not request usage expects no chunk without
    choices. A failure becomes the last event.
    """
    is_first = True

    def deliver(events: list[bytes]) -> bool:
        nonlocal is_first
        if answer.inline is not None:
            events = list(map(answer.inline.mark_event, events))
        if is_first:
            is_first = False
            client.write(_with_sources(json.loads(events[0]), answer))
            events = events[1:]
        if events:
            client.write(_encode_all(events))
        return client.is_full

    with _error_as_event(client, encode_event):
        answer = await relay_answer(services, answer, deliver, client.drain)
        await _write_end(services, answer, client, is_first=is_first, include_usage=include_usage)


async def _write_end(
    services: ChatServices,
    answer: Answer,
    client: ClientWriter,
    *,
    is_first: bool,
    include_usage: bool,
) -> None:
    """Write the last events of an answer.

    Args:
        is_first: Whether no event was written yet.
    """
    assert isinstance(answer.completion, Completion)
    last = answer.completion.last_chunk
    assert last is not None, "a stream that ends without an error has ended every choice"
    if answer.inline is not None:
        answer.inline.mark_chunk(last)
    if is_first:
        last["ragcache"] = _sources(answer)
    text, end = _split_end(last)
    if text is not None:
        client.write(encode_event(text))
    if include_usage:
        client.write(encode_event(end))
    if client.is_full:
        await client.drain()
    costs = await account(services, answer)
    shown = {"timing_ms", "cache"}
    shown |= {one for one in _OPTIONAL if getattr(costs.extension, one) is not None}
    fields = costs.extension.model_dump(mode="json", include=shown)
    if include_usage:
        usage = costs.usage and costs.usage.model_dump(exclude_unset=True)
        end = {name: end[name] for name in ("id", "object", "created", "model") if name in end}
        end |= {"choices": [], "usage": usage}
    client.write(encode_event({**end, "ragcache": {**end.get("ragcache", {}), **fields}}))
    client.write(DONE)


async def write_plain(
    services: ChatServices, plain: PlainCompletion, client: ClientWriter, *, include_usage: bool
) -> None:
    """Write the events of a completion without retrieval, as the engine sends them."""
    completion = plain.completion
    assert isinstance(completion, Completion)

    def deliver(events: list[bytes]) -> bool:
        client.write(_encode_all(events))
        return client.is_full

    with _error_as_event(client, encode_event):
        await relay_events(
            services, plain.engine, completion, plain.num_choices, deliver, client.drain
        )
        assert completion.last_chunk is not None
        settle(completion.usage, None)
        client.write(encode_event(completion.last_chunk))
        if include_usage and completion.usage is not None:
            fields = ("id", "object", "created", "model")
            end = {name: completion.last_chunk.get(name) for name in fields}
            usage = completion.usage.model_dump(exclude_unset=True)
            client.write(encode_event({**end, "choices": [], "usage": usage}))
        client.write(DONE)


@contextmanager
def _error_as_event(
    client: ClientWriter, encode: Callable[[dict[str, Any]], bytes]
) -> Generator[None, None, None]:
    """Make a failure the last event of a stream, and also the cancel of a gateway that stops."""
    try:
        yield
    except RagCacheError as error:
        http = to_http(error)
        note_status(http.status)
        client.write(encode(http.body))
    except asyncio.CancelledError:
        # If the client has left, the write does nothing.
        client.write(encode(to_http(stopping()).body))
        raise


def encode_event(value: Mapping[str, Any]) -> bytes:
    """Encode a JSON object as one event, in ASCII for clients that split text into lines."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _encode_all(events: Sequence[bytes]) -> bytes:
    """Encode several events whose data is encoded already."""
    return b"data: " + b"\n\ndata: ".join(events) + b"\n\n"


def _with_sources(chunk: dict[str, Any], answer: Answer) -> bytes:
    return encode_event({**chunk, "ragcache": _sources(answer)})


def _sources(answer: Answer) -> dict[str, Any]:
    sources: dict[str, Any] = {
        "citations": [citation.model_dump() for citation in answer.citations],
        "warnings": answer.planned.warnings(),
        "queries": list(answer.planned.search.queries),
    }
    if answer.quality is not None:
        sources["quality"] = answer.quality.model_dump(mode="json")
    return sources


def _split_end(chunk: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Split the last chunk into one with text and one with the finish reasons.

    So the text does not wait for the costs, which the gateway asks for at the end. A chunk without
    text stays whole.
    """
    deltas = [choice.get("delta") for choice in chunk["choices"]]
    if not all(isinstance(delta, dict) for delta in deltas) or not any(map(_has_text, deltas)):
        return None, chunk
    text = [{**one, "finish_reason": None, "stop_reason": None} for one in chunk["choices"]]
    ends = [{**one, "delta": {}, "logprobs": None, "token_ids": None} for one in chunk["choices"]]
    rest = {name: value for name, value in chunk.items() if name != "ragcache"}
    return {**chunk, "choices": text}, {**rest, "choices": ends}


def _has_text(delta: Mapping[str, Any]) -> bool:
    return any(value for name, value in delta.items() if name != "role")


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

    The response begins before it is known whether there is an answer. So what fails later is an
    event, not an HTTP status.

    Args:
        stack: Gets what the answer comes from.
    """

    def report(event: AnyStageEvent) -> None:
        client.write(f"event: {STAGE_EVENT}\n".encode() + encode_event(event.model_dump()))

    progress = Progress(report, question.started)
    try:
        answer = await answer_question(services, replace(question, progress=progress), stack)
    except RagCacheError as error:
        record_refusal(error, services.metrics)
        http = to_http(to_rest_error(error))
        note_status(http.status)
        client.write(encode_event(http.body))
        return
    except asyncio.CancelledError:
        client.write(encode_event(to_http(stopping()).body))
        raise
    finally:
        # Guesses end when the stack closes, after the end of the response.
        progress.end()
    await write_answer(services, answer, client, include_usage=include_usage)


async def write_response(
    services: ChatServices, request: ResponseRequest, answer: Answer, client: ClientWriter
) -> None:
    """Write the events of an answer. A failure becomes the last event."""
    events: ResponseEvents | None = None

    def write_chunk(chunk: dict[str, Any]) -> ResponseEvents:
        nonlocal events
        if answer.inline is not None:
            answer.inline.mark_chunk(chunk)
        if events is None:
            cited = None if answer.inline is None else answer.inline.citations
            events = ResponseEvents(head_of(request, chunk), cited)
            client.write(_encode(events.begin()))
        client.write(_encode(events.add(chunk)))
        return events

    def deliver(chunks: list[bytes]) -> bool:
        for chunk in chunks:
            write_chunk(orjson.loads(chunk))
        return client.is_full

    def encode_failure(error: dict[str, Any]) -> bytes:
        return _encode([failure_event(error)] if events is None else events.fail(error))

    with _error_as_event(client, encode_failure):
        answer = await relay_answer(services, answer, deliver, client.drain)
        assert isinstance(answer.completion, Completion)
        last = answer.completion.last_chunk
        assert last is not None, "a stream that ends without an error has ended every choice"
        ending = write_chunk(last)
        if client.is_full:
            await client.drain()
        costs = await account(services, answer)
        usage = None if costs.usage is None else costs.usage.model_dump(exclude_unset=True)
        extension = costs.extension.model_dump(mode="json")
        client.write(_encode(ending.end(response_usage(usage), extension)))


def _encode(events: Iterable[dict[str, Any]]) -> bytes:
    parts = []
    for event in events:
        data = json.dumps(event, separators=(",", ":"))
        parts.append(f"event: {event['type']}\ndata: {data}\n\n")
    return "".join(parts).encode()
