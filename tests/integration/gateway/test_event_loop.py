"""The event loop serves other requests while a prompt is built and sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragcache_gateway.engines import client
from ragcache_gateway.http import json_body, upload
from ragcache_gateway.pipeline import captures, plan
from ragcache_gateway.prompts.builder import PromptBuilder, PromptParts
from tests.kit.gateway import world

WAIT_S = 60.0
"""No test waits as long, unless the event loop is blocked."""


def after_the_loop(
    function: Callable[..., Any], loop: asyncio.AbstractEventLoop, done: set[str]
) -> Callable[..., Any]:
    """Wrap a function so that it waits for the event loop, which it would block for ever inside."""

    def waiting(*args: Any, **kwargs: Any) -> Any:
        turned = threading.Event()
        loop.call_soon_threadsafe(turned.set)
        assert turned.wait(WAIT_S), f"{function.__qualname__} blocks the event loop"
        done.add(function.__qualname__)
        return function(*args, **kwargs)

    return waiting


async def test_a_long_prompt_is_built_planned_and_encoded_outside_the_event_loop(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: set[str] = set()
    loop = asyncio.get_running_loop()
    for module in (plan, client):  # the prompts of this test are short
        monkeypatch.setattr(module, "MAX_LOOP_TOKENS", 0)

    def wrap(owner: Any, name: str) -> None:
        monkeypatch.setattr(owner, name, after_the_loop(getattr(owner, name), loop, done))

    async with world(tiny_model) as gateway:
        wrap(PromptBuilder, "select")
        wrap(PromptParts, "join")
        wrap(plan, "plan_reuse")
        wrap(plan, "client_body")
        wrap(client, "encode_body")
        assert (await gateway.ask()).status_code == 200
        assert done == {
            "PromptBuilder.select",
            "PromptParts.join",
            "plan_reuse",
            "client_body",
            "encode_body",
        }
        done.clear()
        wrap(captures, "plan_exact")
        wrap(captures, "completion_body")
        question = {"messages": [{"role": "user", "content": "Where does billing run?"}]}
        reply = await gateway.client.post("/v1/quality/captures", json=question)
        assert reply.status_code == 200
        assert done == {
            "PromptBuilder.select",
            "PromptParts.join",
            "plan_exact",
            "completion_body",
            "encode_body",
        }


async def test_large_bodies_are_parsed_and_validated_outside_the_event_loop(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: set[str] = set()
    loop = asyncio.get_running_loop()

    def wrap(owner: Any, name: str) -> None:
        monkeypatch.setattr(owner, name, after_the_loop(getattr(owner, name), loop, done))

    async with world(tiny_model) as gateway:
        wrap(json_body, "check_json")
        wrap(upload, "json_document")
        large = {"messages": [{"role": "user", "content": "x" * json_body.LARGE_BYTES}]}
        assert (await gateway.client.post("/v1/chat/completions", json=large)).status_code == 400
        many = {"query": "x", "top_k": 0, "x": [1] * (json_body.LARGE_VALUES + 1)}
        assert (await gateway.client.post("/v1/search", json=many)).status_code == 400
        document = {"id": "a.md", "text": "x" * json_body.LARGE_BYTES}
        assert (await gateway.client.post("/v1/documents", json=document)).status_code == 200
        assert done == {"check_json", "json_document"}
