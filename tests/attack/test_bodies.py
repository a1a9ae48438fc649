"""Bodies that are large, slow or odd delay their sender alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragcache_core.access.json_bounds import MAX_VALUES
from tests.attack.attacked_gateway import QUESTION, AttackedGateway, attacked_gateway
from tests.kit.gateway import bearer

MIB = 1 << 20
CHAT = "/v1/chat/completions"
HEAD = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,'
MANY_NUMBERS = HEAD + b'"x":[' + b",".join([b"1"] * (4 * MIB - 1000)) + b"]}"
MESSAGE = b'{"role":"user","content":""}'

HOSTILE = [
    (CHAT, MANY_NUMBERS),
    (CHAT, HEAD + b'"x":[' + b",".join([b"1"] * MAX_VALUES) + b"]}"),
    (CHAT, b'{"messages":[' + b",".join([MESSAGE] * 8000) + b"]}"),
    ("/v1/completions", b'{"prompt":[' + b",".join([b"1"] * 100_000) + b"]}"),
    (
        "/v1/search",
        b'{"query":"x","x":{' + b",".join(b'"%d":1' % n for n in range(200_000)) + b"}}",
    ),
    ("/v1/embeddings", b'{"input":[' + b",".join([b'"a"'] * MIB) + b"]}"),
    ("/v1/rerank", b'{"query":"x","documents":[' + b",".join([b'""'] * MIB) + b"]}"),
    (
        "/v1/documents",
        b'{"id":"a","text":"b","metadata":{"c":[' + b",".join([b"1"] * 3 * MIB) + b"]}}",
    ),
    ("/v1/documents", b'{"id":"a","text":"b","metadata":' + b"[{}," * MIB),
]


@pytest.mark.parametrize(("path", "body"), HOSTILE)
async def test_a_body_of_many_values_is_refused_and_others_are_served(
    tiny_model: Path, tmp_path: Path, path: str, body: bytes
) -> None:
    async with attacked_gateway(tiny_model, tmp_path) as gateway:
        await gateway.serves_blue()
        sent = [asyncio.create_task(gateway.post("red", path, body)) for _ in range(8)]
        attack = asyncio.gather(*sent)
        while not attack.done():
            await gateway.serves_blue()
        answers = await attack
        # There is memory for few of the largest ones, and for none if all arrive at once.
        assert {answer.status_code for answer in answers} <= {413, 429}
        alone = await gateway.post("red", path, body)
        assert alone.status_code == 413, alone.text
        assert alone.json()["error"]["param"] == "body"


async def test_a_question_may_be_as_large_as_its_model_holds(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with attacked_gateway(tiny_model, tmp_path) as gateway:
        tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1000)]
        body = {**QUESTION, "tools": tools, "max_tokens": 1, "ragcache": {"retrieve": False}}
        answer = await gateway.post("red", CHAT, json.dumps(body).encode())
        # It is read, and what the model does not hold is found out later.
        assert answer.status_code != 413, answer.text


@asynccontextmanager
async def unfinished(
    gateway: AttackedGateway, path: str, begin: bytes, count: int
) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Send requests of the key ``red`` whose bodies do not end."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: {bearer('red')['Authorization']}\r\n"
        f"Content-Length: {len(begin) + 100}\r\n\r\n"
    ).encode()
    readers = []
    async with AsyncExitStack() as stack:
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            stack.callback(writer.close)
            writer.write(head + begin)
            await writer.drain()
            readers.append(reader)
        yield readers


@pytest.mark.parametrize("path", [CHAT, "/v1/search"])
async def test_slow_bodies_take_no_slot_and_end(
    tiny_model: Path, tmp_path: Path, path: str
) -> None:
    limits = {
        "RAGCACHE_MAX_QUESTIONS": "8",
        "RAGCACHE_MAX_DOCUMENT_REQUESTS": "8",
        "RAGCACHE_BODY_TIMEOUT_S": "3",
        "RAGCACHE_BODY_MAX_BYTES": str(4 * MIB),
    }
    async with (
        attacked_gateway(tiny_model, tmp_path, **limits) as gateway,
        unfinished(gateway, path, b"", 16) as readers,
    ):
        ends = asyncio.gather(*(reader.read() for reader in readers))
        while not ends.done():
            metrics = (await gateway.client.get("/metrics")).text
            held = re.findall(r"^ragcache_gateway_requests_in_flight\{.*\} (\d+)", metrics, re.M)
            # The last one of the other tenant may be ending, and this one counts.
            assert sum(map(int, held)) <= 2, held
            await gateway.serves_blue()
            found = await gateway.post("blue", "/v1/search", b'{"query":"x"}')
            assert found.status_code == 200, found.text
        for end in await ends:
            assert end.startswith(b"HTTP/1.1 408"), end


async def test_unfinished_bodies_of_a_key_leave_memory_to_others(
    tiny_model: Path, tmp_path: Path
) -> None:
    limits = {"RAGCACHE_BODIES_MAX_BYTES": str(MIB), "RAGCACHE_BODY_TIMEOUT_S": "600"}
    part = b'{"id":"a","text":"' + b"x" * 100_000
    async with (
        attacked_gateway(tiny_model, tmp_path, **limits) as gateway,
        unfinished(gateway, "/v1/documents", part, 20),
    ):
        document = json.dumps({"id": "b", "text": "y" * 150_000}).encode()
        for _ in range(10):
            stored = await gateway.post("blue", "/v1/documents", document)
            assert stored.status_code == 200, stored.text


def with_arguments(arguments: str) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [turn, {"role": "user", "content": "x"}], "max_tokens": 1}


def called_with(arguments: str) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    return {"input": [call, {"role": "user", "content": "x"}], "max_output_tokens": 1}


@pytest.mark.parametrize(
    "arguments",
    ["[" * 100_000, '{"a":' * 20_000, '{"a": "\\u0000"}', '{"a": NaN}', "[" + "1," * 10_000],
    ids=["lists", "objects", "NUL", "NaN", "many"],
)
async def test_arguments_of_tools_that_no_prompt_can_hold_are_named(
    tiny_model: Path, tmp_path: Path, arguments: str
) -> None:
    field = "messages[0].tool_calls[0].function.arguments"
    async with attacked_gateway(tiny_model, tmp_path) as gateway:
        for path, body in (
            (CHAT, with_arguments(arguments)),
            ("/v1/responses", called_with(arguments)),
        ):
            answer = await gateway.post("red", path, json.dumps(body).encode())
            assert answer.status_code in (400, 413), answer.text
            assert answer.json()["error"]["param"].startswith(field)


async def test_an_address_takes_no_more_than_its_part_of_the_connections(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with (
        attacked_gateway(tiny_model, tmp_path, RAGCACHE_MAX_CONNECTIONS="40") as gateway,
        AsyncExitStack() as stack,
    ):
        refused = 0
        for _ in range(60):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", gateway.port, local_addr=("127.0.0.2", 0)
            )
            stack.callback(writer.close)
            with contextlib.suppress(TimeoutError):  # it is open
                refused += bool(await asyncio.wait_for(reader.read(12), 0.1))
        assert refused >= 30
        other = httpx.AsyncHTTPTransport(local_address="127.0.0.3")
        async with httpx.AsyncClient(transport=other, timeout=60) as client:
            for _ in range(10):
                answer = await client.get(f"http://127.0.0.1:{gateway.port}/healthz")
                assert answer.status_code == 200
