"""A gateway computes prompts in a real vLLM server while their searches run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.completion import is_clear
from harness.processes import CacheStore, Engine
from ragcache_core.plan.prompt import Prompt
from ragcache_gateway.prompts.conversation import Conversation
from ragcache_wire.v1 import retriever_pb2
from ragcache_wire.watched.members import FixedMembers
from tests.kit.gateway import (
    CONFIG,
    FakeRetriever,
    HeldStage,
    World,
    chunk,
    serving,
    serving_retriever,
)
from tests.kit.wait import until

pytestmark = pytest.mark.timeout(600)

BLOCK = 128
MAX_LENGTH = 4096
ANSWER_TOKENS = 4
QUESTION = "Where does billing run?"
WAIT_S = 120.0


@dataclass
class Site:
    """A gateway, and the engine behind it."""

    world: World
    retriever: FakeRetriever
    engine: Engine
    vllm: httpx.AsyncClient

    async def counted(self, name: str) -> int:
        """Return a counter or gauge of vLLM as of its last step."""
        return await self._sum(self.vllm, name + "{")

    async def guesses(self, outcome: str) -> int:
        """Return how many guesses of the gateway had an outcome."""
        name = f'ragcache_gateway_speculation_guesses_total{{outcome="{outcome}"}}'
        return await self._sum(self.world.client, name)

    async def in_flight(self) -> int:
        """Return how many requests of the gateway the engine is answering."""
        return await self._sum(self.world.client, "ragcache_gateway_engine_requests_in_flight{")

    async def _sum(self, client: httpx.AsyncClient, name: str) -> int:
        lines = (await client.get("/metrics")).text.splitlines()
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(name))

    def prompt(self, hits: list[retriever_pb2.Hit]) -> Prompt:
        conversation = Conversation.asking(None, QUESTION)
        return self.world.prompts().build(conversation, hits, ANSWER_TOKENS).prompt

    def ask(self, reuse: str = "exact") -> asyncio.Task[httpx.Response]:
        """Ask the question; the retriever's stages and hits decide what is found."""
        fields: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "temperature": 0}
        return asyncio.create_task(self.world.ask(QUESTION, ragcache={"reuse": reuse}, **fields))


@pytest.fixture
async def site(running: tuple[CacheStore, Engine], tiny_model: Path) -> AsyncGenerator[Site, None]:
    store, engine = running
    async with AsyncExitStack() as stack:
        retriever = FakeRetriever()  # other calls are not served
        address = await stack.enter_async_context(serving_retriever(retriever))
        config = CONFIG.replace(
            speculation="auto",
            model=str(tiny_model),
            model_name="model",
            max_model_len=MAX_LENGTH,
            retriever=address,
            cachestore=FixedMembers((store.address,)),
            engines=(engine.address,),
            first_token_timeout_s=WAIT_S,
        )
        world = World(config, retriever=retriever)
        port = await stack.enter_async_context(serving(world.app()))
        options: dict[str, Any] = {"trust_env": False, "timeout": WAIT_S}
        world.client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", **options)
        )
        vllm = await stack.enter_async_context(httpx.AsyncClient(base_url=engine.url, **options))
        yield Site(world, retriever, engine, vllm)


def hit(name: str, num_items: int) -> retriever_pb2.Hit:
    text = " ".join(f"item {number} of {name}" for number in range(num_items))
    return retriever_pb2.Hit(chunk=chunk(name, 0, text), score=0.9)


def clear_hits(site: Site) -> list[retriever_pb2.Hit]:
    """Return hits for which the answer does not depend on rounding."""
    candidates = ([hit(f"a{n}", 60), hit(f"b{n}", 60)] for n in itertools.count())
    return next(
        hits for hits in candidates if is_clear(site.engine.url, site.prompt(hits), ANSWER_TOKENS)
    )


async def text_of(asking: asyncio.Task[httpx.Response]) -> tuple[str, dict[str, Any]]:
    response = await asking
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["message"]["content"], answer["ragcache"]["cache"]


async def test_the_answer_after_a_confirmed_guess_equals_the_plain_answer(site: Site) -> None:
    site.retriever.hits = clear_hits(site)
    site.retriever.stages = None
    plain, _ = await text_of(site.ask("off"))
    confirmed = await site.guesses("confirmed")
    tokens = await site.counted("vllm:iteration_tokens_total_sum")
    stage = HeldStage(site.retriever.hits, 0.9)
    site.retriever.stages = [stage]
    asking = site.ask()
    num_tokens = len(site.prompt(site.retriever.hits).token_ids)

    async def is_computed() -> bool:
        computed = await site.counted("vllm:iteration_tokens_total_sum") - tokens
        return computed >= num_tokens and await site.in_flight() == 0

    await until(is_computed)
    # The engine has computed the prompt, and the client has nothing.
    assert not asking.done()
    stage.go_on.set()
    text, cache = await text_of(asking)
    assert text == plain
    assert await site.guesses("confirmed") == confirmed + 1
    assert cache["local_tokens"] == (num_tokens - 1) // BLOCK * BLOCK


async def test_a_wrong_guess_is_aborted_and_what_it_computed_is_kept(site: Site) -> None:
    site.retriever.hits = clear_hits(site)
    site.retriever.stages = None
    plain, _ = await text_of(site.ask("off"))
    for attempt in range(10):
        wrong = [hit(f"wrong {attempt} {n}", 60) for n in range(20)]  # as many as fit
        before = await site.guesses("wrong")
        ended = await site.counted("vllm:request_success_total")
        stage = HeldStage(wrong, 0.9)
        site.retriever.stages = [stage]
        asking = site.ask()

        async def has_begun(ended: int = ended) -> bool:
            # A guess that ends between two questions is never seen running.
            is_running = await site.counted("vllm:num_requests_running") > 0
            return is_running or await site.counted("vllm:request_success_total") > ended

        await until(has_begun)
        stage.go_on.set()
        assert (await text_of(asking))[0] == plain
        assert await site.guesses("wrong") == before + 1
        num_ended = await site.counted("vllm:request_success_total") - ended
        # If the test stalls until the whole guess is computed, try again.
        if num_ended == 1:
            break
    assert num_ended == 1, "vLLM counts no request that it aborts"
    hits, site.retriever.hits, site.retriever.stages = site.retriever.hits, wrong, None
    _, cache = await text_of(site.ask())
    assert cache["local_tokens"] + cache["loaded_tokens"] >= BLOCK
    site.retriever.hits = hits
