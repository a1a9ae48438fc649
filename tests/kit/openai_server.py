"""A server of OpenAI's API that knows nothing of vLLM, and refuses what it does not know."""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

_COMMON: Final = {
    *("model", "max_tokens", "temperature", "top_p", "n", "seed", "stop"),
    *("stream", "stream_options", "logprobs"),
}
_CHAT: Final = {
    *_COMMON,
    *("messages", "tools", "tool_choice", "response_format", "top_logprobs"),
}
_MESSAGE: Final = {"role", "content", "tool_calls", "tool_call_id", "name"}
CALL: Final[dict[str, Any]] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": 1}'},
}


class OpenAIServer:
    """An ASGI app with ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``.

    Its events differ from vLLM's as those of real servers do: the first one has no choices, there
    are spaces in the JSON, choices have no index, and a finish reason is of its own.

    Args:
        model: Name of its one model.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.key: str | None = None
        self.words = ["It runs in ", "eu-north", "."]
        self.calls = False  # whether it answers with a tool call
        self.requests: list[dict[str, Any]] = []
        self.probes = 0
        self.hosts: set[str] = set()
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completion, methods=["POST"]),
            ]
        )

    def system(self, number: int) -> str:
        """Return the text of the system message of a request."""
        first = self.requests[number]["messages"][0]
        assert first["role"] == "system"
        return str(first["content"])

    async def _models(self, request: Request) -> Response:
        return self._refused(request) or JSONResponse({"data": [{"id": self.model}]})

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, _CHAT)

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, {*_COMMON, "prompt"})

    async def _answer(self, request: Request, known: set[str]) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        body = await request.json()
        if body["model"] != self.model:
            return _error(404, f"The model `{body['model']}` does not exist")
        for field in body.keys() - known:
            return _error(400, f"Unrecognized request argument supplied: {field}", field)
        if not _is_text(body):
            return _error(400, "messages must be text")
        if body["max_tokens"] == 1 and not body.get("stream"):
            self.probes += 1
        else:
            self.requests.append(body)
        is_chat = "messages" in body
        if body.get("stream"):
            return StreamingResponse(self._events(is_chat), media_type="text/event-stream")
        text = "".join(self.words)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.calls:
            message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        part: dict[str, Any] = {"message": message} if is_chat else {"text": text}
        return JSONResponse(
            {**self._head(), "choices": [{**part, "finish_reason": "eos_token"}], **_usage(3)}
        )

    async def _events(self, is_chat: bool) -> Any:
        yield _event({**self._head(), "choices": []})
        if is_chat:
            yield _event(self._part({"delta": {"role": "assistant"}}))
        for word in () if self.calls else self.words:
            yield _event(self._part({"delta": {"content": word}} if is_chat else {"text": word}))
        if self.calls:
            yield _event(self._part({"delta": {"tool_calls": [{"index": 0, **CALL}]}}))
        end: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        yield _event(self._part({**end, "finish_reason": "eos_token"}))
        yield _event({**self._head(), "choices": [], **_usage(3)})
        yield b"data: [DONE]\n\n"

    def _part(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(), "choices": [choice], "usage": None}

    def _head(self) -> dict[str, Any]:
        return {"id": "srv-1", "object": "x", "created": 1_700_000_000, "model": self.model}

    def _refused(self, request: Request) -> Response | None:
        self.hosts.add(request.headers["host"])
        given = request.headers.get("authorization", "")
        if self.key is None or given == f"Bearer {self.key}":
            return None
        return _error(401, f"Incorrect API key provided: {given.removeprefix('Bearer ')}")


def _is_text(body: dict[str, Any]) -> bool:
    if "messages" not in body:
        return isinstance(body["prompt"], str)
    calls = [call for one in body["messages"] for call in one.get("tool_calls") or ()]
    return (
        all(set(one) <= _MESSAGE for one in body["messages"])
        and all(isinstance(one["content"], str) for one in body["messages"])
        and all(isinstance(call["function"]["arguments"], str) for call in calls)
    )


def _usage(num_tokens: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 70, "completion_tokens": num_tokens}}


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def _error(status: int, message: str, param: str | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "param": param}}, status)
