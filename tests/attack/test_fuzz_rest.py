"""No body of a request stops a gateway, makes it fail, or costs memory for ever."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attack.attacked_gateway import AttackedGateway, attacked_gateway
from tests.attack.fuzzed_process import FuzzedProcess
from tests.attack.mutations import mutated_json
from tests.kit.gateway import bearer

SEED = 37
THREADS = 4
WARM_UP = 2000
"""Bodies after which caches and pools of a gateway have their size."""
TIMEOUT_S = 60.0

_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}
_CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Oslo"},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [_TOOL],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 4,
    "temperature": 0.5,
    "ragcache": {
        "top_k": 2,
        "filter": {"all": [{"key": "team", "in": ["a", "b"]}]},
        "reuse": "exact",
        "explain": True,
        "deadline_ms": 60_000,
    },
}
CORPUS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("POST", "/v1/chat/completions", _CHAT),
    ("POST", "/v1/completions", {"prompt": "Where?", "max_tokens": 2, "ragcache": {"top_k": 1}}),
    ("POST", "/v1/completions", {"prompt": [[1, 2, 3], [4]], "max_tokens": 2, "n": 1}),
    (
        "POST",
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "Where?"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "Oslo"},
            ],
            "instructions": "Answer.",
            "max_output_tokens": 2,
            "text": {"format": {"type": "text"}},
        },
    ),
    ("POST", "/v1/search", {"query": "Where?", "top_k": 2, "filter": {"key": "a", "equals": 1}}),
    ("POST", "/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ("POST", "/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("POST", "/v1/documents", {"id": "a.md", "text": "# A\n\nb", "metadata": {"team": ["a"]}}),
    ("PUT", "/v1/collections/default", {"chunk_tokens": 128, "window": 1}),
)


def requests(seed: int, count: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield method, path and body of requests; the same ones for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        method, path, value = rng.choice(CORPUS)
        yield method, path, mutated_json(value, rng)


def send(port: int, seed: int, count: int) -> None:
    """Send requests over one connection after the other, and check the answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    headers = bearer("red") | {"Content-Type": "application/json"}
    with contextlib.closing(connection):
        for method, path, body in requests(seed, count):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            answer = response.read()
            told = f"{response.status} for {method} {path} {body[:2000]!r}: {answer[:500]!r}"
            assert response.status != 500, told
            if response.status >= 400:
                assert json.loads(answer)["error"]["message"], told


async def fuzz(gateway: AttackedGateway, count: int) -> None:
    async def send_all(first_seed: int, many: int) -> None:
        each = many // THREADS
        sent = (asyncio.to_thread(send, gateway.port, first_seed + i, each) for i in range(THREADS))
        await asyncio.gather(*sent)

    await send_all(SEED, WARM_UP)
    process = FuzzedProcess(gateway.process.pid, gateway.log)
    process.warmed_up()
    await send_all(SEED + THREADS, count - WARM_UP)
    process.check()
    await gateway.serves_blue()


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(10_000, marks=pytest.mark.timeout(300)),
        pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
async def test_mutated_bodies_are_answered_and_cost_no_memory(
    tiny_model: Path, tmp_path: Path, count: int
) -> None:
    async with attacked_gateway(tiny_model, tmp_path) as gateway:
        await fuzz(gateway, count)
