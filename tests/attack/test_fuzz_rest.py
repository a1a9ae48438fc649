"""No body of a request stops a gateway, makes it fail, or costs memory for ever."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attack.attacked_gateway import AttackedGateway, attacked_gateway
from tests.kit.gateway import bearer

SEED = 37
THREADS = 4
WARM_UP = 2000
"""Bodies after which caches and pools of a gateway have their size."""
MAX_GROWTH_BYTES = 64 << 20
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
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 1e308, float("inf"), float("nan"), 2**63, -(2**64), 10**400),
    *("", "\0", "\ud800", "\u202e", "a" * 5000, "<|im_end|>", "../../x", "{}", "[" * 3000),
    *([], {}, [[]], {"": {}}, [None] * 300, {"a": {"b": {"c": [1, {"d": "e"}]}}}),
)


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value below one, as its container and its key."""
    stack = [value]
    while stack:
        container = stack.pop()
        keys: Any = range(len(container)) if isinstance(container, list) else container
        for key in keys:
            yield container, key
            if isinstance(container[key], dict | list):
                stack.append(container[key])


def with_odd_value(value: Any, rng: random.Random) -> bytes:
    """Replace, remove, rename, nest or repeat a value."""
    for turn in range(rng.randint(1, 3)):
        value = json.loads(json.dumps(value))  # so that no two places share an object
        found = list(nodes(value))
        if not found:
            break
        container, key = rng.choice(found)
        match rng.randrange(5):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice(("", "\0", "\ud800", "x" * 300, "priority"))] = container[key]
            case 2:
                for _ in range(rng.choice((2, 60, 70, 200))):
                    container[key] = [container[key]]
            case 3:
                # Turns multiply.
                container[key] = [container[key]] * (rng.choice((2, 40, 400)) if turn == 0 else 2)
            case _:
                container[key] = rng.choice(ODD)
    return json.dumps(value, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass")


def with_odd_bytes(value: Any, rng: random.Random) -> bytes:
    """Change, remove, insert or repeat bytes."""
    body = bytearray(json.dumps(value).encode())
    for _ in range(rng.randint(1, 4)):
        i = rng.randrange(len(body) + 1)
        j = min(len(body), i + rng.choice((1, 2, 8, 64)))
        match rng.randrange(5):
            case 0:
                del body[i:j]
            case 1:
                body[i:i] = rng.randbytes(rng.choice((1, 2, 9)))
            case 2:
                body[i:i] = body[i:j] * rng.choice((1, 9, 90))
            case 3:
                body[i:j] = rng.choice((b'"', b"\\", b"[", b"}", b",", b"\xff", b"\\ud83d", b"1e9"))
            case _:
                del body[i:]
    return bytes(body)


MUTATORS: tuple[Callable[[Any, random.Random], bytes], ...] = (with_odd_value, with_odd_bytes)


def requests(seed: int, count: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield method, path and body of requests; the same ones for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        method, path, value = rng.choice(CORPUS)
        yield method, path, rng.choice(MUTATORS)(value, rng)


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
    before = gateway.process.memory_info().rss
    await send_all(SEED + THREADS, count - WARM_UP)
    growth = gateway.process.memory_info().rss - before
    assert growth <= MAX_GROWTH_BYTES, f"{growth} bytes more after {count} bodies"
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
