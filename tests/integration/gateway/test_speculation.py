"""Prompts that an engine computes while a search runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragcache_core.identity.keys import KEY_BYTES, VariantKey, common_tokens
from ragcache_core.knowledge.node_change import NodeChange, StoredNode
from ragcache_core.plan.segments import checked_segments
from ragcache_core.scheduling.priority import GUESS_BAND
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_gateway.engines import engine_load
from ragcache_wire.v1 import retriever_pb2
from tests.integration.gateway.test_engines import Fleet, fleet
from tests.kit.gateway import (
    CONFIG,
    FakeEngine,
    HeldStage,
    World,
    band_of,
    bearer,
    chunk,
    data_of,
    plan_of,
    until_predicted,
    write_keys,
)
from tests.kit.wait import until

ANSWER = "It runs in eu-north."


@asynccontextmanager
async def speculating(
    model: Path,
    token_s: float = 0.01,
    headers: dict[str, str] | None = None,
    store_feed: EngineFeed | None = None,
    **changes: Any,
) -> AsyncGenerator[World, None]:
    """Run a gateway whose engine says what its prefills cost, and predict the engine's cache."""
    async with AsyncExitStack() as stack:
        config = CONFIG.replace(**{"speculation": "auto", **changes})
        world = World(config)
        world.store.feed = store_feed
        world.records.pass_tokens, world.records.token_s = 64, token_s
        world.retriever.hits = [hit("billing.md"), hit("search.md")]
        await world.start(stack, model)
        world.client.headers.update(headers or {})
        await until_predicted(world.client)
        yield world


@pytest.fixture
async def gateway(tiny_model: Path) -> AsyncGenerator[World, None]:
    async with speculating(tiny_model) as running:
        yield running


def hit(document: str) -> retriever_pb2.Hit:
    """Return a chunk that takes longer to compute than what an engine computes twice."""
    text = " ".join(f"Line {number} is all about {document}." for number in range(8))
    return retriever_pb2.Hit(chunk=chunk(document, 0, text), score=0.9)


async def arrival(gateway: World, number: int) -> dict[str, Any]:
    """Wait for a request of the engine, the first one having the number 1."""
    await until(lambda: len(gateway.engine.requests) >= number)
    return gateway.engine.requests[number - 1]


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


async def test_a_probable_guess_is_computed_while_the_search_runs(gateway: World) -> None:
    stage = HeldStage(gateway.retriever.hits, 0.9)
    gateway.retriever.stages = [stage]
    asking = asyncio.create_task(gateway.ask(temperature=0.7, seed=3))
    prefill = await arrival(gateway, 1)
    assert (band_of(prefill), prefill["max_tokens"]) == (GUESS_BAND, 1)
    stage.go_on.set()
    assert text_of(await asking) == ANSWER
    _, question = gateway.engine.requests
    assert question["prompt"] == prefill["prompt"]
    assert band_of(question) == 0
    assert (question["temperature"], question["seed"]) == (0.7, 3)
    # The engine may store and load the same for both.
    plans = [plan_of(one) for one in (prefill, question)]
    segments = [checked_segments(one, prefill["prompt"], gateway.space()) for one in plans]
    assert segments[0] == segments[1]
    assert plans[0].request != plans[1].request
    assert await gateway.metric('speculation_guesses_total{outcome="confirmed"}') == 1
    assert await gateway.metric("speculation_wasted_tokens_total") == 0


async def test_the_time_that_a_confirmed_guess_saves_is_counted(gateway: World) -> None:
    stage = HeldStage(gateway.retriever.hits, 0.9)
    gateway.retriever.stages = [stage]
    asking = asyncio.create_task(gateway.ask())
    await arrival(gateway, 1)
    await gateway.until_metric("engine_requests_in_flight", 0.0)
    stage.go_on.set()
    assert text_of(await asking) == ANSWER
    assert await gateway.metric("speculation_saved_seconds_total") > 0
    await gateway.until_metric("prediction_ratio_count", 1.0)


async def test_a_guess_that_is_running_at_the_end_of_the_search_is_ended(gateway: World) -> None:
    """The question continues where it was, at the priority of questions."""
    stage = HeldStage(gateway.retriever.hits, 0.9)
    gateway.retriever.stages = [stage]
    gateway.engine.hold_prefills = asyncio.Event()
    asking = asyncio.create_task(gateway.ask())
    await gateway.engine.waiting.wait()
    stage.go_on.set()
    assert text_of(await asking) == ANSWER
    await gateway.engine.aborted.wait()
    assert await gateway.metric('speculation_guesses_total{outcome="confirmed"}') == 1


async def test_stages_with_the_same_hits_keep_the_guess(gateway: World) -> None:
    stages = [HeldStage(gateway.retriever.hits, share) for share in (0.6, 0.7, 0.1)]
    gateway.retriever.stages = stages
    asking = asyncio.create_task(gateway.ask())
    await arrival(gateway, 1)
    for stage in stages:
        stage.go_on.set()
    assert text_of(await asking) == ANSWER
    assert len(gateway.engine.requests) == 2
    assert await gateway.metric('speculation_decisions_total{decision="start"}') == 1


async def test_a_changed_guess_replaces_the_first_one_after_what_both_begin_with(
    gateway: World,
) -> None:
    gateway.retriever.hits = [hit("one"), hit("two")]
    stages = [HeldStage([hit("one"), hit("three")], 0.9), HeldStage(gateway.retriever.hits, 0.9)]
    gateway.retriever.stages = stages
    gateway.engine.hold_prefills = asyncio.Event()
    asking = asyncio.create_task(gateway.ask())
    await gateway.engine.waiting.wait()
    stages[0].go_on.set()
    await gateway.engine.aborted.wait()
    second = await arrival(gateway, 2)
    # No client gets anything before the search has ended.
    assert not asking.done()
    stages[1].go_on.set()
    assert text_of(await asking) == ANSWER
    first, _, question = gateway.engine.requests
    assert question["prompt"] == second["prompt"] != first["prompt"]
    plan = plan_of(first)
    common = plan.segments[1].end  # the head and the first chunk
    assert first["prompt"][:common] == second["prompt"][:common]
    assert await gateway.metric('speculation_guesses_total{outcome="confirmed"}') == 1
    assert await gateway.metric('speculation_guesses_total{outcome="wrong"}') == 1
    assert await gateway.metric('speculation_decisions_total{decision="replace"}') == 1


async def test_a_wrong_guess_changes_nothing_and_its_tokens_are_counted(gateway: World) -> None:
    stage = HeldStage([hit("wrong")], 0.9)
    gateway.retriever.stages = [stage]
    asking = asyncio.create_task(gateway.ask())
    prefill = await arrival(gateway, 1)
    await gateway.until_metric("engine_requests_in_flight", 0.0)
    stage.go_on.set()
    assert text_of(await asking) == ANSWER
    _, question = gateway.engine.requests
    assert question["prompt"] != prefill["prompt"]
    common = common_tokens(prefill["prompt"], question["prompt"])
    assert 0 < common < len(question["prompt"])
    assert (
        await gateway.metric("speculation_wasted_tokens_total") == len(prefill["prompt"]) - common
    )
    assert await gateway.metric('speculation_guesses_total{outcome="wrong"}') == 1


async def test_an_improbable_stage_starts_no_guess(gateway: World) -> None:
    stages = [HeldStage(gateway.retriever.hits, 0.01), HeldStage(gateway.retriever.hits, 0.9)]
    gateway.retriever.stages = stages
    asking = asyncio.create_task(gateway.ask())
    await gateway.until_metric('speculation_decisions_total{decision="nothing"}', 1.0)
    assert gateway.engine.requests == []
    # The same hits are more probable later.
    stages[0].go_on.set()
    await arrival(gateway, 1)
    stages[1].go_on.set()
    assert text_of(await asking) == ANSWER


@asynccontextmanager
async def with_a_chunk_on_disk(model: Path, **changes: Any) -> AsyncGenerator[World, None]:
    """Run a gateway whose store tells that it has one chunk of the hits on its disk."""
    feed = EngineFeed()
    chunk_key = World(CONFIG.replace(model=str(model))).chunk_key(hit("search.md").chunk.text)
    node = StoredNode(VariantKey(chunk_key, bytes(KEY_BYTES)), None, 99, 9, True, 0.0)
    # Before the gateway starts, so that the snapshot has it.
    feed.publish([NodeChange.stored("disk", node)])
    async with speculating(model, store_feed=feed, **changes) as gateway:

        async def counts() -> bool:
            text = (await gateway.client.get("/v1/cache")).json()
            return any(
                one["source"].startswith("store:") and one["state"] == "synchronized"
                for one in text["sources"]
            )

        await until(counts)
        yield gateway


@pytest.mark.parametrize("speculation", ["auto", "off"])
async def test_without_a_guess_the_store_is_told_the_chunks(
    tiny_model: Path, speculation: str
) -> None:
    async with with_a_chunk_on_disk(tiny_model, speculation=speculation) as gateway:
        await check_prefetch(gateway)


async def check_prefetch(gateway: World) -> None:
    """Check a question for which a busy engine computes nothing ahead."""
    gateway.engine.pause = asyncio.Event()
    busy = asyncio.create_task(gateway.ask())
    await gateway.engine.waiting.wait()
    stage = HeldStage(gateway.retriever.hits, 0.5)
    gateway.retriever.stages = [stage]
    asking = asyncio.create_task(gateway.ask())
    await until(lambda: bool(gateway.store.prefetched))
    assert len(gateway.engine.requests) == 1
    stage.go_on.set()
    question = await arrival(gateway, 2)
    plan = plan_of(question)
    named = checked_segments(plan, question["prompt"], gateway.space())
    assert [one.variant.to_bytes() for one in named] == [
        key.chunk + key.prefix for key in gateway.store.prefetched
    ]
    gateway.engine.pause.set()
    assert text_of(await busy) == text_of(await asking) == ANSWER
    assert await gateway.metric("speculation_prefetched_variants_total") == len(named)


async def test_a_client_that_disconnects_ends_the_search_and_the_guess(gateway: World) -> None:
    gateway.retriever.stages = [HeldStage(gateway.retriever.hits, 0.9)]
    gateway.engine.hold_prefills = asyncio.Event()
    asking = asyncio.create_task(gateway.ask())
    await gateway.engine.waiting.wait()
    asking.cancel()
    await gateway.engine.aborted.wait()
    await gateway.retriever.cancelled.wait()
    await gateway.until_metric("engine_requests_in_flight", 0.0)
    await gateway.until_metric('speculation_guesses_total{outcome="abandoned"}', 1.0)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {"reuse": "off"}),  # the engine does not keep the KV
        ({}, {"reuse": "blend"}),
        ({"speculation": "off"}, {}),
        ({"token_s": 0.0}, {}),  # the engine does not report its costs
    ],
)
async def test_no_guess_is_computed(
    tiny_model: Path, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    async with speculating(tiny_model, **settings) as gateway:
        stage = HeldStage(gateway.retriever.hits, 0.9)
        stage.go_on.set()
        gateway.retriever.stages = [stage]
        assert text_of(await gateway.ask(ragcache=options)) == ANSWER
        assert len(gateway.engine.requests) == 1


SYSTEM_PROMPT = [
    {"role": "system", "content": "You know everything about billing. " * 16},
    {"role": "user", "content": "Where does billing run?"},
]


async def slow_search(gateway: World | Fleet) -> None:
    """Make searches of the collection longer than a request."""
    first = HeldStage([], 0.0)
    gateway.retriever.stages = [first]
    slow = asyncio.create_task(gateway.ask())
    await until(lambda: len(gateway.retriever.searches) == 1)
    await asyncio.sleep(0.05)
    first.go_on.set()
    text_of(await slow)


@pytest.mark.parametrize("reuse", ["exact", "blend"])
async def test_a_new_system_prompt_is_computed_while_the_search_runs(
    gateway: World, reuse: str
) -> None:
    """No other request finds a blended chunk, but all find the head, which is exact."""
    await slow_search(gateway)
    for number in (1, 2):
        # A guess of the hits would end the warm-up. A blend has none.
        hits = gateway.retriever.hits if reuse == "blend" else []
        stage = HeldStage(hits, 0.99)
        gateway.retriever.stages = [stage]
        options = {"reuse": reuse}
        asking = asyncio.create_task(gateway.ask(messages=SYSTEM_PROMPT, ragcache=options))
        if number == 1:
            warm_up = await arrival(gateway, 2)
            await gateway.until_metric("engine_requests_in_flight", 0.0)
        stage.go_on.set()
        text_of(await asking)
    # The second question with this system prompt needs no warm-up.
    _, _, question, _ = gateway.engine.requests
    assert (band_of(warm_up), warm_up["max_tokens"]) == (GUESS_BAND, 1)
    head = len(warm_up["prompt"])
    assert 0 < head < len(question["prompt"])
    assert question["prompt"][:head] == warm_up["prompt"]
    plan = plan_of(warm_up)
    assert not plan.blends
    named = checked_segments(plan, warm_up["prompt"], gateway.space())
    assert named[-1].segment.end == head
    assert await gateway.metric("speculation_warm_ups_total") == 1


async def test_a_system_prompt_that_was_computed_for_one_tenant_is_computed_for_another(
    tiny_model: Path, tmp_path: Path
) -> None:
    tenants = {name: f'scopes = ["admin"]\ntenant = "{name}"' for name in ("red", "blue")}
    file = write_keys(tmp_path / "keys.toml", tenants)
    async with speculating(tiny_model, headers=bearer("red"), api_keys_file=file) as gateway:
        await slow_search(gateway)
        for number, tenant in ((2, "red"), (4, "blue")):
            stage = HeldStage([], 0.0)
            gateway.retriever.stages = [stage]
            gateway.client.headers.update(bearer(tenant))
            asking = asyncio.create_task(gateway.ask(messages=SYSTEM_PROMPT))
            warm_up = await arrival(gateway, number)
            assert (warm_up["cache_salt"], warm_up["max_tokens"]) == (f"tenant:{tenant}", 1)
            stage.go_on.set()
            text_of(await asking)


@pytest.fixture
async def two(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Fleet, None]:
    """Run a gateway with two engines that say what prefills cost, and predict their caches."""
    monkeypatch.setattr(engine_load, "REFRESH_S", 0.01)
    async with fleet(tiny_model, monkeypatch, 2, speculation="auto") as running:
        for records in running.records.values():
            records.pass_tokens, records.token_s = 64, 0.01
        running.retriever.hits = [hit("billing.md"), hit("search.md")]
        await until(lambda: all(one.costs_sent >= 2 for one in running.records.values()))
        await until_predicted(running.client)
        yield running


async def test_the_question_goes_to_the_engine_that_has_computed_its_guess(two: Fleet) -> None:
    stage = HeldStage(two.retriever.hits, 0.9)
    two.retriever.stages = [stage]
    asking = asyncio.create_task(two.ask())
    await until(lambda: sum(two.asked()) == 1)
    guessed_by = two.asked().index(1)
    stage.go_on.set()
    assert text_of(await asking) == ANSWER
    assert two.asked()[guessed_by] == 2
    # Guesses do not change whose turn it is, where no engine has a part of the prompt.
    two.retriever.stages = None
    for _ in range(4):
        assert text_of(await two.ask(ragcache={"reuse": "off"})) == ANSWER
    assert sorted(two.asked()) == [2, 4]


async def test_a_guess_goes_to_the_engine_that_has_its_documents(two: Fleet) -> None:
    """Also if the guess is confirmed, but not computed yet, and the other engine is idle."""
    having, _ = await answered(two)
    stage = HeldStage(two.retriever.hits, 0.9)
    two.retriever.stages = [stage]
    # A third document, so that there is something to compute.
    two.retriever.hits = stage.hits = [*two.retriever.hits, hit("more.md")]
    having.hold_prefills = asyncio.Event()
    asking = asyncio.create_task(two.ask())
    await having.waiting.wait()
    stage.go_on.set()
    assert text_of(await asking) == ANSWER
    prefill, question = having.requests[1:]
    assert question["prompt"] == prefill["prompt"]


async def answered(two: Fleet) -> tuple[FakeEngine, FakeEngine]:
    """Have a question answered; return the engine that has its documents now, and the other."""
    assert text_of(await two.ask()) == ANSWER
    engines = sorted(two.engines.values(), key=lambda engine: len(engine.requests))
    assert [len(engine.requests) for engine in engines] == [0, 1]
    return engines[1], engines[0]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_wrong_or_failed_guess_on_another_engine_does_not_take_the_question(
    two: Fleet, fails: bool
) -> None:
    having, other = await answered(two)
    other.fails_prefills = fails
    having.pause = asyncio.Event()
    two.retriever.stages = None
    busy = asyncio.create_task(two.ask(stream=True))
    await having.waiting.wait()
    # The engine that has the documents is busy, and of the guess only the short head is cached.
    stage = HeldStage([hit(f"wrong-{number}.md") for number in range(8)], 0.99)
    two.retriever.stages = [stage]
    asking = asyncio.create_task(two.ask())
    await until(lambda: len(other.requests) == 1)
    having.pause.set()
    assert ANSWER in words_of(await busy)
    if fails:
        await two.until_ready(*two.engines)
    stage.go_on.set()
    assert text_of(await asking) == ANSWER
    assert [len(having.requests), len(other.requests)] == [3, 1]
    assert having.requests[-1]["prompt"] == having.requests[0]["prompt"]
    outcome = "failed" if fails else "wrong"
    metrics = (await two.client.get("/metrics")).text
    assert f'speculation_guesses_total{{outcome="{outcome}"}} 1.0' in metrics


def words_of(response: httpx.Response) -> str:
    """Return the text of a streamed answer."""
    events = data_of(response.text)
    words = [one["choices"][0]["delta"].get("content", "") for one in events[:-1] if one["choices"]]
    return "".join(words)


async def test_the_question_goes_to_the_engine_that_has_computed_its_system_prompt(
    two: Fleet,
) -> None:
    await slow_search(two)
    before = two.asked()
    stage = HeldStage([], 0.0)
    two.retriever.stages = [stage]
    asking = asyncio.create_task(two.ask(messages=SYSTEM_PROMPT))
    await until(lambda: sum(two.asked()) == sum(before) + 1)
    warmed_by = next(i for i in range(2) if two.asked()[i] > before[i])
    # It is computed, and not only requested.
    await until_idle(two)
    stage.go_on.set()
    assert text_of(await asking) == ANSWER
    assert two.asked()[warmed_by] == before[warmed_by] + 2


async def until_idle(two: Fleet) -> None:
    async def is_idle() -> bool:
        return not any(one["in_flight"] for one in (await two.endpoints()).values())

    await until(is_idle)
