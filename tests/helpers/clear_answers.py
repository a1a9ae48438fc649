"""Prompts whose answers do not hang on how sums are rounded.

Beside other requests a prompt is computed in batches of another shape, and on some machines their
sums are rounded otherwise, with our connector or without it. Where two tokens are about as likely
that may change the answer, and where one of them is far ahead it may not.
"""

from __future__ import annotations

import uuid

import httpx

from ragcache_core.plan.prompt import Prompt

AHEAD = 0.4
"""Of the next likely token, in log-probability: several times what rounding to bfloat16 makes."""


def is_clear(url: str, prompt: Prompt, max_tokens: int) -> bool:
    """Whether each of the tokens that vLLM alone says is far ahead of the next likely one."""
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
        if best - second < AHEAD:
            return False
    return True
