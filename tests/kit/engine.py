"""Reads what an engine and its store have, and finds prompts for exact comparisons.

Concurrent requests are computed in batches of another shape. On some machines their sums are
rounded differently, with the connector or without it. That may change the answer where two tokens
are about equally likely, but not where one is far ahead.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

import httpx

from ragcache_core.identity.keys import VariantKey
from ragcache_core.plan.prompt import Prompt
from ragcache_core.store_api import LookupKey
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.peers.credentials import NO_CREDENTIALS, Credentials

MIN_LEAD = 0.4
"""Lead in log-probability over the second token, several times the error of bfloat16."""


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
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
    for likely in reply["choices"][0]["logprobs"]["top_logprobs"]:
        best, second, *_ = sorted(likely.values(), reverse=True)
        if best - second < MIN_LEAD:
            return False
    return True


STORE_AWAY = ("store unavailable", "lookup timed out")
"""Reasons while the store is away: its connection ends or the deadline passes first."""


def samples(url: str, *names: str, **labels: str) -> list[str]:
    """Return the lines of a server's metrics that begin with one of the names."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return [one for one in lines if one.startswith(names) and all(each in one for each in wanted)]


def total(lines: Iterable[str]) -> float:
    """Return the sum of samples."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def is_stored(
    address: str, keys: Iterable[VariantKey], credentials: Credentials = NO_CREDENTIALS
) -> bool:
    """Tell whether a store has all of these variants."""
    client = StoreClient(address, credentials=credentials)
    try:
        wants = [LookupKey.for_variant(key) for key in keys]
        return all(found.stored for found in client.lookup(wants, 60).variants)
    finally:
        client.close()
