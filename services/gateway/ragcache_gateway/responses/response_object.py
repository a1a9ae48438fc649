"""Response objects, made from the chat completions of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ragcache_gateway.chat.schema import InlineCitation, RagCacheAnswer
from ragcache_gateway.responses.request_schema import ResponseRequest


class ResponseObject(BaseModel):
    """An answer in the format of the responses API."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    ragcache: RagCacheAnswer | None = None


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What the objects of one response have in common.

    Args:
        key: Distinguishes the ids of this response from those of others.
        created: Unix time, in seconds.
    """

    request: ResponseRequest
    key: str
    model: str
    created: int

    def item_id(self, kind: str, index: int) -> str:
        """Return the id of an output item."""
        return f"{kind}_{self.key}_{index}"

    def to_object(
        self, status: str, output: list[dict[str, Any]], **more: object
    ) -> dict[str, Any]:
        """Return the response object in one of its states."""
        request, extra = self.request, self.request.model_extra or {}
        reasoning = request.reasoning
        return {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": extra.get("metadata") or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": extra.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
            "store": False,
            "temperature": extra.get("temperature"),
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": extra.get("top_p"),
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def to_final(
        self, output: list[dict[str, Any]], finish_reason: str | None, **more: object
    ) -> dict[str, Any]:
        """Return the response object of a finished answer."""
        if finish_reason != "length":
            return self.to_object("completed", output, **more)
        details = {"reason": "max_output_tokens"}
        return self.to_object("incomplete", output, incomplete_details=details, **more)


def head_of(request: ResponseRequest, completion: Mapping[str, Any]) -> ResponseHead:
    """Return the head of the response that a completion, or a chunk of one, belongs to."""
    key = str(completion["id"]).partition("-")[2]
    return ResponseHead(request, key, str(completion["model"]), int(completion["created"]))


def response_of(request: ResponseRequest, completion: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response that a chat completion stands for."""
    head = head_of(request, completion)
    choice = completion["choices"][0]
    message = choice["message"]
    output: list[dict[str, Any]] = []
    if message.get("reasoning"):
        output.append(reasoning_item(head.item_id("rs", 0), message["reasoning"]))
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        item_id = head.item_id("msg", len(output))
        cited = completion["ragcache"].get("inline_citations") or ()
        annotations = annotations_of(map(InlineCitation.model_validate, cited))
        text = message.get("content") or ""
        output.append(message_item(item_id, text, annotations=annotations))
    for call in calls:
        function = call["function"]
        item_id = head.item_id("fc", len(output))
        output.append(call_item(item_id, call["id"], function["name"], function["arguments"]))
    return head.to_final(
        output,
        choice["finish_reason"],
        usage=response_usage(completion.get("usage")),
        ragcache=completion["ragcache"],
    )


def annotations_of(citations: Iterable[InlineCitation], start: int = 0) -> list[dict[str, Any]]:
    """Return OpenAI's annotations of a text.

    Args:
        start: First character of the text in the whole answer.
    """
    found: list[dict[str, Any]] = []
    for one in citations:
        if one.end < start:
            continue
        moved = one.model_copy(update={"end": one.end - start})
        if one.is_url:
            found.append({"type": "url_citation", **moved.url_fields()})
        else:
            file = {"file_id": one.document_id, "filename": one.title, "index": moved.end}
            found.append({"type": "file_citation", **file})
    return found


def message_item(
    item_id: str,
    text: str,
    status: str = "completed",
    annotations: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return an output item with text; one in progress has no content yet."""
    content = [text_part(text, annotations)] if status == "completed" else []
    base = {"id": item_id, "type": "message", "role": "assistant"}
    return {**base, "status": status, "content": content}


def text_part(text: str, annotations: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the content of a message."""
    base = {"type": "output_text", "text": text}
    return {**base, "annotations": list(annotations), "logprobs": []}


def call_item(
    item_id: str, call_id: str, name: str, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    """Return an output item with a function call."""
    call = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"id": item_id, "type": "function_call", **call, "status": status}


def reasoning_item(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    """Return an output item with the model's reasoning."""
    content = [{"type": "reasoning_text", "text": text}] if status == "completed" else []
    base = {"id": item_id, "type": "reasoning", "summary": []}
    return {**base, "content": content, "status": status}


def response_usage(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the token counts by the names of the responses API."""
    if usage is None:
        return None
    prompt = usage.get("prompt_tokens_details") or {}
    answer = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": prompt.get("cached_tokens") or 0,
            "cache_write_tokens": prompt.get("created_cache_tokens") or 0,
        },
        "output_tokens": usage.get("completion_tokens") or 0,
        "output_tokens_details": {"reasoning_tokens": answer.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
        **({"ragcache": usage["ragcache"]} if usage.get("ragcache") else {}),
    }
