"""Two gateways share what they know through a real retriever: removed text and quality verdicts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from ragcache_core.quality.controller import MIN_QUESTIONS, SAMPLE_UNDECIDED_EVERY, alpha_ladder
from ragcache_core.scheduling.priority import BACKGROUND_BAND
from ragcache_gateway.background import precompute, quality_gate, quality_trials
from ragcache_gateway.documents import removal_feed
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.service import SERVICE_NAME, RetrieverService
from ragcache_wire.server import GrpcServer
from ragcache_wire.v1 import retriever_pb2_grpc
from tests.kit.gateway import CONFIG, FakeRetriever, World, band_of, plan_of
from tests.kit.retriever import make_knowledge_base, tokenizer_of
from tests.kit.wait import until

SHARE = 0.4
TARGET: dict[str, Any] = {"reuse": "blend", "max_recompute_share": SHARE, "quality": 0.9}
TRIED = 'blend_trials_total{outcome="tried"}'
PAGES = {"billing.md": "Billing runs in eu-north.", "search.md": "Search runs in eu-south."}


@pytest.fixture(autouse=True)
def intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a gateway no way to learn of removals by chance, but let it read verdicts soon."""
    monkeypatch.setattr(removal_feed, "POLL_S", 600.0)
    monkeypatch.setattr(precompute, "LINGER_S", 0.0)
    monkeypatch.setattr(quality_gate, "REFRESH_S", 0.05)


@dataclass
class Replicas:
    """Starts gateways over one real retriever."""

    retriever: RetrieverService
    knowledge_base: KnowledgeBase
    model: Path

    @asynccontextmanager
    async def serving_retriever(self, port: int) -> AsyncIterator[None]:
        """Serve the retriever once more, at a port."""
        server = GrpcServer(
            f"127.0.0.1:{port}",
            [SERVICE_NAME],
            lambda server: retriever_pb2_grpc.add_RetrieverServicer_to_server(
                self.retriever, server
            ),
        )
        await server.start()
        await server.set_ready()
        try:
            yield
        finally:
            await server.stop()

    @asynccontextmanager
    async def gateway(self, **settings: Any) -> AsyncIterator[World]:
        async with AsyncExitStack() as stack:
            retriever = cast("FakeRetriever", self.retriever)
            world = World(CONFIG.replace(**TARGET | settings), retriever=retriever)
            yield await world.start(stack, self.model)


@pytest_asyncio.fixture
async def replicas(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Replicas]:
    knowledge_base = make_knowledge_base(tmp_path, tokenizer_of(tiny_model), clock=time.time)
    await knowledge_base.load()
    yield Replicas(RetrieverService(knowledge_base), knowledge_base, tiny_model)
    await knowledge_base.close()


def background_requests(gateway: World) -> list[dict[str, Any]]:
    return [body for body in gateway.engine.requests if band_of(body) == BACKGROUND_BAND]


async def put(gateway: World, name: str, text: str) -> None:
    reply = await gateway.client.post("/v1/documents", json={"id": name, "text": text})
    assert reply.status_code == 200


async def remove(gateway: World, how: str) -> None:
    """Remove text of search.md."""
    if how == "delete":
        reply = await gateway.client.delete("/v1/documents/search.md")
    elif how == "replace":
        body = {"id": "search.md", "text": "Another text."}
        reply = await gateway.client.post("/v1/documents", json=body)
    else:
        chunking = {"size_tokens": 16, "overlap_tokens": 0}
        url = "/v1/collections/default"
        reply = await gateway.client.put(url, json={"chunking": chunking})
    assert reply.status_code == 200


@pytest.mark.parametrize("how", ["delete", "replace", "split again"])
async def test_no_trial_replays_text_that_another_gateway_has_removed(
    replicas: Replicas, how: str
) -> None:
    async with replicas.gateway() as one, replicas.gateway() as other:
        for name, text in PAGES.items():
            await put(one, name, text + " It has a second part, which is long enough." * 3)
        await one.put_report(0.95, SHARE)
        await other.until_verdict("passed")
        pause = other.engine.pause = asyncio.Event()
        asked = asyncio.create_task(other.ask("Where does search run?"))
        await asyncio.wait_for(other.engine.waiting.wait(), 60)
        other.engine.waiting.clear()
        first_replay = other.engine.pause = asyncio.Event()
        pause.set()
        assert (await asked).status_code == 200
        await asyncio.wait_for(other.engine.waiting.wait(), 60)
        assert len(background_requests(other)) == 1
        await remove(one, how)
        # Documents are split again in the background.
        await replicas.knowledge_base.wait_until_idle()
        other.engine.pause = None
        first_replay.set()
        await asyncio.sleep(0.5)
        assert len(background_requests(other)) == 1


async def test_no_chunk_is_computed_ahead_that_another_gateway_has_deleted(
    replicas: Replicas,
) -> None:
    async with (
        replicas.gateway(precompute=True, quality=None) as one,
        replicas.gateway(precompute=True, quality=None) as other,
    ):
        pause = other.engine.pause = asyncio.Event()
        await put(one, "billing.md", PAGES["billing.md"])
        asked = asyncio.create_task(other.ask())
        await asyncio.wait_for(other.engine.waiting.wait(), 60)
        for name, text in PAGES.items():
            await put(other, f"new-{name}", f"Now {text}")
        await one.client.delete("/v1/documents/new-search.md")
        other.engine.pause = None
        pause.set()
        assert (await asked).status_code == 200
        await until(lambda: bool(background_requests(other)))
        await asyncio.sleep(0.5)
        computed = {
            segment.document
            for body in background_requests(other)
            for segment in plan_of(body).segments[1:]
        }
        assert computed == {"default/new-billing.md"}


async def test_no_text_is_replayed_until_the_retriever_that_was_away_answers(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_trials, "RETRY_S", 0.05)
    async with replicas.gateway() as gateway:
        for name, text in PAGES.items():
            await put(gateway, name, text)
        await gateway.put_report(0.95, SHARE)
        pause = gateway.engine.pause = asyncio.Event()
        asked = asyncio.create_task(gateway.ask())
        await asyncio.wait_for(gateway.engine.waiting.wait(), 60)
        gateway.engine.pause = None
        port = gateway.servers["retriever"].port
        await gateway.servers["retriever"].stop()
        pause.set()
        assert (await asked).status_code == 200
        await asyncio.sleep(0.5)
        assert not background_requests(gateway)
        async with replicas.serving_retriever(port):
            await until(lambda: bool(background_requests(gateway)))


async def test_reuse_is_exact_until_a_report_and_every_gateway_learns_of_it(
    replicas: Replicas,
) -> None:
    async with replicas.gateway() as one, replicas.gateway() as other:
        await put(one, "billing.md", PAGES["billing.md"])
        for gateway in (one, other):
            await gateway.ask()
            assert not plan_of(gateway.engine.requests[0]).blends
        assert (await one.put_report(0.95, SHARE)).status_code == 200
        await other.until_verdict("passed")
        await other.ask("Another question?")
        questions = [body for body in other.engine.requests if band_of(body) == 0]
        assert plan_of(questions[1]).blends
    async with replicas.gateway() as restarted:
        await restarted.until_verdict("passed")


async def test_what_trials_decide_reaches_other_gateways_and_survives_restarts(
    replicas: Replicas,
) -> None:
    def blended_in_trials(request: str) -> dict[str, int]:
        return {"blended_tokens": 20 if request.startswith("trial-") else 0}

    num_replays = 1 + len(alpha_ladder(SHARE))
    async with replicas.gateway() as one, replicas.gateway() as other:
        await put(one, "billing.md", PAGES["billing.md"])
        one.records.fields_of = blended_in_trials
        for number in range(MIN_QUESTIONS * SAMPLE_UNDECIDED_EVERY):
            assert not other.engine.requests
            asked = (await one.ask(f"Question {number}?")).json()
            assert asked["ragcache"]["quality"] == {"verdict": "unverified", "reuse": "exact"}
            sampled = (number + 1) // SAMPLE_UNDECIDED_EVERY
            # What is kept is not stored: its KV would be exact, and a replay no blend.
            [plan] = [p for p in map(plan_of, one.engine.requests) if p.request == asked["id"]]
            is_sampled = sampled * SAMPLE_UNDECIDED_EVERY == number + 1
            assert (plan.blends, plan.trial) == (False, is_sampled)
            # A question that comes before the end of a trial would have its requests repeated.
            await one.until_metric(TRIED, sampled * (num_replays - 1))
            assert len(background_requests(one)) == sampled * num_replays
        await one.until_verdict("passed")
        await other.until_verdict("passed")
        await other.ask()
        plan = plan_of(other.engine.requests[0])
        assert (plan.blends, plan.alpha) == (True, 0.0)  # all answers are equal
    async with replicas.gateway(quality=0.8) as with_another_target:
        await asyncio.sleep(0.3)
        await with_another_target.until_verdict("unverified")
    async with replicas.gateway() as restarted:
        await restarted.until_verdict("passed")
        await restarted.ask()
        plan = plan_of(restarted.engine.requests[0])
        assert (plan.blends, plan.alpha) == (True, 0.0)
