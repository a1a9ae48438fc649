"""The events of a streamed response, made from the chunks of a chat completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ragcache_gateway.chat.schema import InlineCitation
from ragcache_gateway.responses.response_object import (
    ResponseHead,
    annotations_of,
    call_item,
    message_item,
    reasoning_item,
    text_part,
)

Event = dict[str, Any]


def failure_event(error: Mapping[str, Any]) -> Event:
    """Return the event of a failure before the first chunk."""
    message = str(error["error"]["message"])
    base = {"type": "error", "sequence_number": 0, "param": None}
    return {**base, "code": "server_error", "message": message}


class ResponseEvents:
    """Follows one answer and returns the events that each chunk stands for.

    Output items come one after the other: an item ends when the next one begins.

    Args:
        cited: Returns what the markers in the answer so far stand for. None: it has none.
    """

    def __init__(
        self, head: ResponseHead, cited: Callable[[], Sequence[InlineCitation]] | None = None
    ) -> None:
        self._head = head
        self._cited = cited
        self._cited_chars = 0  # of earlier messages
        self._next_number = 0
        self._output: list[dict[str, Any]] = []
        self._kind = ""  # of the open item: msg, rs or fc; empty: none is open
        self._item_id = ""
        self._text = ""
        self._call: dict[str, str] = {}
        self._call_index: int | None = None
        self._finish_reason: str | None = None

    def begin(self) -> list[Event]:
        """Return the events before the first text."""
        started = self._head.to_object("in_progress", [])
        return [
            self._event("response.created", response=started),
            self._event("response.in_progress", response=started),
        ]

    def add(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Return the events of a chunk."""
        events: list[Event] = []
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            if delta.get("reasoning"):
                events += self._add_text("rs", delta["reasoning"])
            if delta.get("content"):
                events += self._add_text("msg", delta["content"])
            for call in delta.get("tool_calls") or ():
                events += self._add_call(call)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return events

    def end(self, usage: dict[str, Any] | None, ragcache: dict[str, Any]) -> list[Event]:
        """Return the events after the last text."""
        events = list(self._close())
        if all(item["type"] == "reasoning" for item in self._output):
            events += self._add_text("msg", "")
            events += self._close()
        response = self._head.to_final(
            self._output, self._finish_reason, usage=usage, ragcache=ragcache
        )
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def fail(self, error: Mapping[str, Any]) -> list[Event]:
        """Return the event of an answer that has failed."""
        shown = {"code": "server_error", "message": str(error["error"]["message"])}
        response = self._head.to_object("failed", self._output, error=shown)
        return [self._event("response.failed", response=response)]

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._kind != kind:
            yield from self._close()
            self._open(kind)
            make = message_item if kind == "msg" else reasoning_item
            yield self._item_event("added", make(self._item_id, "", "in_progress"))
            if kind == "msg":
                yield self._event("response.content_part.added", **self._at(), part=text_part(""))
        if not text:
            return
        self._text += text
        if kind == "msg":
            yield self._event("response.output_text.delta", **self._at(), delta=text, logprobs=[])
        else:
            yield self._event("response.reasoning_text.delta", **self._at(), delta=text)

    def _add_call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        function = call.get("function") or {}
        if self._kind != "fc" or call.get("index") != self._call_index:
            yield from self._close()
            self._open("fc")
            self._call_index = call.get("index")
            self._call = {
                "call_id": str(call.get("id") or f"call_{self._item_id}"),
                "name": str(function.get("name") or ""),
            }
            item = call_item(self._item_id, **self._call, arguments="", status="in_progress")
            yield self._item_event("added", item)
        arguments = function.get("arguments")
        if arguments:
            self._text += arguments
            yield self._event(
                "response.function_call_arguments.delta",
                item_id=self._item_id,
                output_index=len(self._output),
                delta=arguments,
            )

    def _open(self, kind: str) -> None:
        self._kind, self._text = kind, ""
        self._item_id = self._head.item_id(kind, len(self._output))

    def _close(self) -> Iterator[Event]:
        """Yield the events that end the open item."""
        kind, text = self._kind, self._text
        if kind == "msg":
            annotations = annotations_of(self._cited() if self._cited else (), self._cited_chars)
            self._cited_chars += len(text)
            item = message_item(self._item_id, text, annotations=annotations)
            for i, one in enumerate(annotations):
                kind = "response.output_text.annotation.added"
                yield self._event(kind, **self._at(), annotation_index=i, annotation=one)
            yield self._event("response.output_text.done", **self._at(), text=text, logprobs=[])
            part = text_part(text, annotations)
            yield self._event("response.content_part.done", **self._at(), part=part)
        elif kind == "rs":
            item = reasoning_item(self._item_id, text)
            yield self._event("response.reasoning_text.done", **self._at(), text=text)
        elif kind == "fc":
            item = call_item(self._item_id, **self._call, arguments=text)
            yield self._event(
                "response.function_call_arguments.done",
                item_id=self._item_id,
                output_index=len(self._output),
                name=self._call["name"],
                arguments=text,
            )
        else:
            return
        yield self._item_event("done", item)
        self._output.append(item)
        self._kind = ""

    def _at(self) -> dict[str, Any]:
        """Return where the open item's text is."""
        index = len(self._output)
        return {"item_id": self._item_id, "output_index": index, "content_index": 0}

    def _item_event(self, state: str, item: dict[str, Any]) -> Event:
        index = len(self._output)
        return self._event(f"response.output_item.{state}", output_index=index, item=item)

    def _event(self, kind: str, **fields: object) -> Event:
        number = self._next_number
        self._next_number += 1
        return {"type": kind, "sequence_number": number, **fields}
