"""An answer as a stream of the responses API."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import orjson

from ragcache_core.errors import RagCacheError
from ragcache_gateway.engines.completion_stream import Completion
from ragcache_gateway.http.errors import to_http
from ragcache_gateway.http.streaming.client_writer import ClientWriter
from ragcache_gateway.pipeline.account import account, answer_extension
from ragcache_gateway.pipeline.answer import Answer, relay_events
from ragcache_gateway.pipeline.chat_services import ChatServices
from ragcache_gateway.responses.request_schema import ResponseRequest
from ragcache_gateway.responses.response_events import ResponseEvents
from ragcache_gateway.responses.response_object import head_of, response_usage


async def write_response(
    services: ChatServices, request: ResponseRequest, answer: Answer, client: ClientWriter
) -> None:
    """Write the events of an answer. A failure becomes the last event."""
    completion = answer.completion
    assert isinstance(completion, Completion)
    events: ResponseEvents | None = None

    def write_chunk(chunk: dict[str, Any]) -> ResponseEvents:
        nonlocal events
        if events is None:
            events = ResponseEvents(head_of(request, chunk))
            client.write(_encode(events.begin()))
        client.write(_encode(events.add(chunk)))
        return events

    def deliver(chunks: list[bytes]) -> bool:
        for chunk in chunks:
            write_chunk(orjson.loads(chunk))
        return client.is_full

    try:
        await relay_events(services, answer.engine, completion, 1, deliver, client.drain)
    except RagCacheError as error:
        if events is not None:
            client.write(_encode(events.fail(to_http(error).body)))
        return
    last = completion.last_chunk
    assert last is not None, "a stream that ends without an error has ended every choice"
    ending = write_chunk(last)
    if client.is_full:
        await client.drain()
    costs = await account(services, answer)
    extension = answer_extension(answer, costs)
    usage = None if costs.usage is None else costs.usage.model_dump(exclude_unset=True)
    client.write(_encode(ending.end(response_usage(usage), extension.model_dump(mode="json"))))


def _encode(events: Iterable[dict[str, Any]]) -> bytes:
    parts = []
    for event in events:
        data = json.dumps(event, separators=(",", ":"))
        parts.append(f"event: {event['type']}\ndata: {data}\n\n")
    return "".join(parts).encode()
