"""One streamed completion of an engine, timed from the request's first byte, and its record."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from harness.processes import Engine
from ragcache_core.plan.prompt import Prompt
from ragcache_core.plan.signature import SIGNATURE_FIELD
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials
from ragcache_wire.v1 import engine_pb2

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Completion:
    """ttft_s: seconds to the first token. token_ids: what was generated.

    cached_tokens: of the prompt, as the engine reports them; 0 unless asked for.
    """

    ttft_s: float
    token_ids: tuple[int, ...]
    cached_tokens: int = 0


def complete(
    url: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    plan: str | None = None,
    signature: str | None = None,
    cache_salt: str | None = None,
    headers: Mapping[str, str] | None = None,
    usage: bool = False,
    client: httpx.Client | None = None,
) -> Completion:
    """Generate greedily. plan: an encoded ReusePlan, for an engine with our connector.

    signature: the plan's (``plan_seal``), for an engine that asks for one. usage: whether to ask
    for the number of cached tokens. client: saves some 20 ms, in which httpx otherwise makes a
    TLS context.
    """
    body: dict[str, Any] = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    if plan is not None:
        body["kv_transfer_params"] = {"ragcache": plan}
        if signature is not None:
            body["kv_transfer_params"][SIGNATURE_FIELD] = signature
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if usage:
        body["stream_options"] = {"include_usage": True}
    started = time.monotonic()
    first: float | None = None
    cached_tokens = 0
    tokens: list[int] = []
    address = f"{url}/v1/completions"
    stream = httpx.stream if client is None else client.stream
    with stream("POST", address, json=body, headers=headers, timeout=TIMEOUT_S) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"the engine said {reply.status_code}: {reply.read()!r}")
        for event in events(reply):
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            cached_tokens = details.get("cached_tokens") or cached_tokens
            if not event["choices"]:  # the one with the usage
                continue
            ids = event["choices"][0].get("token_ids") or []
            if ids and first is None:
                first = time.monotonic()
            tokens += ids
    if first is None:
        raise RuntimeError("the engine generated no token")
    return Completion(first - started, tuple(tokens), cached_tokens)


def events(reply: httpx.Response) -> Iterator[Any]:
    """What a stream of events says, without its end.

    Lines end where HTTP says: text that a model of random weights makes up may have other things
    in it that Python takes for the end of a line.
    """
    rest = b""
    for part in reply.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))


def record_of(
    engine: Engine, request: str, credentials: Credentials = NO_CREDENTIALS
) -> engine_pb2.RequestRecord:
    """What an engine with our connector knows of a request, by the id in its plan.

    credentials: of the engine's platform.
    """

    async def fetch() -> engine_pb2.RequestRecord:
        assert engine.records is not None
        client = EngineClient(engine.records, credentials)
        try:
            return await client.request_record(request, TIMEOUT_S)
        finally:
            await client.close()

    return asyncio.run(fetch())


MIN_LEAD = 0.4
"""Lead in log-probability over the second token, several times the error of bfloat16.

Concurrent requests are computed in batches of another shape. On some machines their sums are
rounded differently, with the connector or without it. That may change the answer where two tokens
are about equally likely, but not where one is far ahead.
"""


def is_clear(url: str, prompt: Prompt, max_tokens: int) -> bool:
    """Tell whether each token of vLLM's own answer is far ahead of the second most likely one."""
    body = {
        "model": "model",
        "prompt": list(prompt.token_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        "cache_salt": uuid.uuid4().hex,
    }
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).raise_for_status()
    for likely in reply.json()["choices"][0]["logprobs"]["top_logprobs"]:
        best, second, *_ = sorted(likely.values(), reverse=True)
        if best - second < MIN_LEAD:
            return False
    return True
