"""Finds prompts whose answers do not depend on how sums are rounded.

Concurrent requests are computed in batches of another shape. On some machines their sums are
rounded differently, with the connector or without it. That may change the answer where two tokens
are about equally likely, but not where one is far ahead.
"""

from __future__ import annotations

import uuid

import httpx

from ragcache_core.plan.prompt import Prompt

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
