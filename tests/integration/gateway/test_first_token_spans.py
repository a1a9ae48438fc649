"""The parts of 200 mixed requests add up to their times to the first token, and none is lost."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from harness.otlp import TracedRequest, attributes_of, collector, orphans, traced_request
from ragcache_core.identity.keys import KEY_BYTES, VariantKey
from ragcache_core.knowledge.node_change import NodeChange, StoredNode
from ragcache_core.scheduling.priority import GUESS_BAND
from ragcache_engine.telemetry.engine_feed import EngineFeed
from ragcache_wire.telemetry import semantic_conventions as names
from ragcache_wire.v1 import retriever_pb2
from tests.integration.gateway.test_speculation import hit
from tests.kit.gateway import (
    CONFIG,
    FakeEngine,
    FakeRetriever,
    FakeStore,
    World,
    band_of,
    data_of,
    serving,
    until_ready,
)
from tests.kit.wait import until

SEARCH_S: Final = 0.1
ENGINE_S: Final = 0.2
TOLERANCE: Final = 0.05
CALLER: Final = "b7ad6b7169203331"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
AT_ONCE: Final = 6
NUM_REQUESTS: Final = 200
NUM_ABANDONED, NUM_REFUSED = 5, 2
NUM_IN_TURN: Final = 8 + 8 + 6 + 4 + NUM_ABANDONED + 5 + NUM_REFUSED

PREFETCHED: Final = tuple(f"prefetched {number}?" for number in range(22, 26))
"""Questions whose chunks are on a disk: those after three other kinds."""

STAGES: Final[dict[str, list[tuple[str, float]]]] = {
    "kept": [("billing search", 0.9), ("billing search", 0.95)],
    "wrong": [("wrong", 0.9)],
    "cancelled": [("wrong", 0.9), ("billing search", 0.0)],
    "abandoned": [("wrong", 0.9)],
    "prefetched": [("billing search", 0.9)],
}
"""By the first word of a question: the documents of the stages before the final one, and how
probable each stage is."""


def hits_of(documents: str, question: str) -> list[retriever_pb2.Hit]:
    """Return hits that no other question has, so that its prompt is new to the engines."""
    return [hit(f"{document} of {question}") for document in documents.split()]


def caller_of(context: Any) -> str:
    """Return the id of the span that a call came from."""
    return str(dict(context.invocation_metadata())["traceparent"]).split("-")[2]


class MixedEngine(FakeEngine):
    """Takes its time, and fails questions that say so.

    Args:
        lost: Ids of the requests that an engine has failed.
    """

    def __init__(self, lost: set[str]) -> None:
        super().__init__()
        self._lost = lost

    @property
    def num_guesses(self) -> int:
        return sum(band_of(one) == GUESS_BAND for one in self.requests)

    async def _answer(self, reply: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(ENGINE_S)
        await super()._answer(reply, receive, send)

    async def _stream(self, reply: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(ENGINE_S)
        question = str((reply.body.get("messages") or [{}])[-1].get("content"))
        is_lost = "fails once" in question and reply.request_id not in self._lost
        if is_lost or "fails twice" in question:
            self._lost.add(reply.request_id)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await super()._stream(reply, receive, send)


class MixedRetriever(FakeRetriever):
    """Takes its time, and sends the stages that a question names."""

    def __init__(self, num_guesses: Callable[[], int]) -> None:
        super().__init__()
        self.callers: list[str] = []
        self.num_cancelled = 0
        self._num_guesses = num_guesses

    async def Search(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.callers.append(caller_of(context))
        question = request.query
        word = question.split()[0]
        num_guesses = self._num_guesses()
        try:
            for number, (documents, probability) in enumerate(STAGES.get(word, ()), 1):
                yield retriever_pb2.SearchStage(
                    hits=hits_of(documents, question),
                    # As if the scan had a hundred seconds to go.
                    progress=0.01 * number,
                    search_us=1_000_000 * number,
                    final_probability=probability,
                )
                if number == 1 and word != "prefetched":
                    await until(lambda: self._num_guesses() > num_guesses)
            if word == "abandoned":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        await asyncio.sleep(SEARCH_S)
        hits = hits_of("billing search", question)
        yield retriever_pb2.SearchStage(
            hits=hits, final=True, progress=1, embed_us=9500, search_us=250
        )


class MixedStore(FakeStore):
    def __init__(self) -> None:
        super().__init__()
        self.callers: list[str] = []

    async def Prefetch(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.callers.append(caller_of(context))
        return await super().Prefetch(request, context)


def disk_feed(model: Path, questions: Sequence[str]) -> EngineFeed:
    """Return the feed of a store that has the first chunk of each question on its disk only."""
    feed, keys = EngineFeed(), World(CONFIG.replace(model=str(model)))
    for question in questions:
        chunk = keys.chunk_key(hits_of("billing", question)[0].chunk.text)
        node = StoredNode(VariantKey(chunk, bytes(KEY_BYTES)), None, 99, 9, True, 0.0)
        feed.publish([NodeChange.stored("disk", node)])
    return feed


@dataclass
class Answered:
    """An answer, and what the gateway says about its time in ms."""

    trace_id: str
    route: str
    question: str
    timing_ms: dict[str, float] | None
    streams: bool

    @property
    def kind(self) -> tuple[str, str, bool]:
        """What requests with the same parts have in common."""
        return self.route, self.question.rstrip("?0123456789 "), self.streams


@dataclass
class MixedWorld(World):
    """A gateway with two engines, and the answers that it gave."""

    second: MixedEngine = field(default_factory=lambda: MixedEngine(set()))
    second_port: int = 0
    answered: list[Answered] = field(default_factory=list)
    num_requests: int = 0
    num_others: int = 0  # without an answer of the model

    def app(self) -> Any:
        second = self.engine_name(self.second_port)
        self.config = self.config.replace(engines=(*self.config.engines, second))
        return super().app()

    async def post(self, route: str, body: Any, status: int = 200) -> httpx.Response:
        """Send a request that is traced, and keep what its answer says."""
        self.num_requests += 1
        trace_id = f"{self.num_requests:032x}"
        headers = {"traceparent": f"00-{trace_id}-{CALLER}-01"}
        answer = await self.client.post(route, json=body, headers=headers)
        assert answer.status_code == status, answer.text
        streams = bool(body.get("stream"))
        if route not in (CHAT, COMPLETIONS):
            self.num_others += 1
        elif status == 200:
            question = body.get("prompt") or body["messages"][0]["content"]
            timing = timing_of(answer, streams)
            self.answered.append(Answered(trace_id, route, question, timing, streams))
        return answer

    async def ask(self, question: str = "plain", status: int = 200, **more: Any) -> httpx.Response:
        body = {
            "messages": [{"role": "user", "content": f"{question} {self.num_requests}?"}],
            **more,
        }
        return await self.post(CHAT, body, status)


def timing_of(answer: httpx.Response, streams: bool) -> dict[str, float] | None:
    if streams:
        events = [one for one in data_of(answer.text) if one != "[DONE]"]
        assert not any("error" in one for one in events)
    else:
        events = [answer.json()]
    found = [
        one["ragcache"]["timing_ms"] for one in events if "timing_ms" in one.get("ragcache", {})
    ]
    return found[0] if found else None


async def in_turn(count: int, request: Callable[[], Awaitable[Any]]) -> None:
    """Send requests one after another."""
    for _ in range(count):
        await request()


async def at_once(requests: Sequence[Callable[[], Awaitable[Any]]]) -> None:
    """Send requests, AT_ONCE at a time."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(request: Callable[[], Awaitable[Any]]) -> None:
        async with free:
            await request()

    async with asyncio.TaskGroup() as group:
        for request in requests:
            group.create_task(one(request))


async def with_guesses(world: MixedWorld) -> None:
    """Send NUM_IN_TURN questions whose searches have early stages, or whose engines fail."""
    retriever: Any = world.retriever
    await in_turn(8, lambda: world.ask("kept", stream=True))
    await in_turn(8, lambda: world.ask("wrong", stream=True))
    await in_turn(6, lambda: world.ask("cancelled"))
    assert f"prefetched {world.num_requests}?" == PREFETCHED[0]
    await in_turn(4, lambda: world.ask("prefetched", ragcache={"reuse": "blend"}))
    for number in range(1, NUM_ABANDONED + 1):
        prefills = _num_guesses(world) + 1
        asking = asyncio.create_task(world.ask("abandoned", stream=True))
        await until(partial(lambda count: _num_guesses(world) == count, prefills))
        asking.cancel()
        await until(partial(lambda count: retriever.num_cancelled == count, number))
    for _ in range(5):
        await until_ready(world.client, 2)
        await world.ask("fails once", stream=True)
    for _ in range(NUM_REFUSED):
        await until_ready(world.client, 2)
        await world.ask("fails twice", stream=True, status=503)
    await until_ready(world.client, 2)


def _num_guesses(world: MixedWorld) -> int:
    engines: tuple[Any, ...] = (world.engine, world.second)
    return sum(engine.num_guesses for engine in engines)


async def without_guesses(world: MixedWorld) -> None:
    """Send the other requests: equally many of each kind, several at once."""
    search = {"retrieve": True}
    kinds: list[Callable[[], Awaitable[Any]]] = [
        lambda: world.ask(stream=True),
        world.ask,
        lambda: world.ask(stream=True, ragcache={"retrieve": False}),
        lambda: world.ask(ragcache={"retrieve": False}),
        lambda: world.ask(stream=True, ragcache={"reuse": "off"}),
        lambda: world.ask(stream=True, ragcache={"max_searches": 2}),
        lambda: world.post(COMPLETIONS, {"prompt": "It runs in", "stream": True}),
        lambda: world.post(COMPLETIONS, {"prompt": "It runs in"}),
        lambda: world.post(COMPLETIONS, {"prompt": "Where?", "stream": True, "ragcache": search}),
        lambda: world.post("/v1/embeddings", {"input": ["It runs in Oslo."]}),
        lambda: world.post("/v1/rerank", {"query": "Where?", "documents": ["Oslo", "Rome"]}),
        lambda: world.post("/v1/search", {"query": "Where?"}),
    ]
    await at_once([kinds[i % len(kinds)] for i in range(NUM_REQUESTS - NUM_IN_TURN)])


def record_of(request: str) -> dict[str, Any]:
    """Return an engine's record: every second request has loaded nothing."""
    record = {"queue_s": 0.01, "load_s": 0.01, "prefill_s": ENGINE_S - 0.02}
    if int(request[-1], 16) % 2:
        return record
    nothing = ("local_tokens", "loaded_tokens", "loaded_bytes", "blended_tokens")
    missed = dict.fromkeys((*nothing, "recomputed_tokens"), 0)
    return {**record, **missed, "recompute_s": 0.0, "miss": "not stored"}


def deviation(request: TracedRequest, answered: Answered) -> float:
    """Return by what share the parts miss what the trace and the gateway say."""
    waited_s = request.waited_s()
    found = {part.name for part in request.parts}
    assert {"read", "engine"} <= found
    assert waited_s >= ENGINE_S
    of_trace = abs(request.parts_s(request.answered_ns) / waited_s - 1)
    if answered.timing_ms is None:
        return of_trace
    assert "tokenize" in found
    assert ("retrieve" in found) is (answered.timing_ms["stages"] > 0)
    # The gateway's own clock begins after it has read the request.
    until_ns = request.answered_ns
    if not answered.streams:
        # No event tells when the first token came. The engine's record has the time until then.
        until_ns = request.named("engine")[-1].start_time_unix_nano + round(1e9 * ENGINE_S)
    parts_s = request.parts_s(until_ns, without="read")
    return max(of_trace, abs(1e3 * parts_s / answered.timing_ms["first_token"] - 1))


def check_spans(spans: Sequence[Any]) -> None:
    """Check that the spans are those of what happened."""
    names_of_spans = Counter(span.name for span in spans)
    assert {"read", "retrieve", "tokenize", "plan", "engine"} <= set(names_of_spans)
    assert names_of_spans["prefetch"] >= 4
    outcomes = Counter(attributes_of(s)["outcome"] for s in spans if s.name == "guess")
    assert outcomes["confirmed"] >= 8
    assert outcomes["abandoned"] == NUM_ABANDONED
    assert outcomes["wrong"] >= 8 + 6
    decided = Counter(e.name for s in spans if s.name == "speculation" for e in s.events)
    assert {"start", "keep", "cancel", "nothing"} <= set(decided)
    kinds = Counter(attributes_of(s).get(names.SPAN_KIND) for s in spans if s.name == "engine")
    assert set(kinds) == {"LLM"}
    by_trace = Counter(
        (s.trace_id, s.parent_span_id) for s in spans if s.name == "engine" and s.status.code == 2
    )
    assert list(by_trace.values()).count(1) >= 5, "an engine has failed, and another one answered"
    assert list(by_trace.values()).count(2) == NUM_REFUSED, "both engines have failed"


@pytest.mark.timeout(600)
async def test_the_parts_of_200_mixed_requests_add_up_and_no_span_is_an_orphan(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # All spans are sent at the end, so that their encoding delays no request.
    for name in ("SCHEDULE_DELAY", "MAX_QUEUE_SIZE", "MAX_EXPORT_BATCH_SIZE"):
        monkeypatch.setenv(f"OTEL_BSP_{name}", "100000")
    lost: set[str] = set()
    engines = (MixedEngine(lost), MixedEngine(lost))
    with collector() as receiver:
        async with AsyncExitStack() as stack:
            world = MixedWorld(
                CONFIG.replace(otlp_endpoint=receiver.url, speculation="auto"),
                MixedRetriever(lambda: sum(one.num_guesses for one in engines)),
                MixedStore(),  # type: ignore[abstract]
                engine=engines[0],
                second=engines[1],
            )
            world.store.feed = disk_feed(tiny_model, PREFETCHED)
            world.second_port = await stack.enter_async_context(serving(world.second))
            world.records.pass_tokens, world.records.token_s = 64, 0.01
            world.records.fields_of = record_of
            await world.start(stack, tiny_model)
            await until_ready(world.client, 2)
            await with_guesses(world)
            await without_guesses(world)
        assert world.num_requests == NUM_REQUESTS
        spans = receiver.spans()
    assert not orphans(spans, [CALLER])
    known = {span.span_id.hex() for span in spans}
    asked = [h["traceparent"].split("-")[2] for engine in engines for h in engine.headers]
    retriever, store = world.retriever, world.store
    assert {*asked, *retriever.callers, *store.callers} <= known  # type: ignore[attr-defined]
    assert world.num_others + len(world.answered) == NUM_REQUESTS - NUM_ABANDONED - NUM_REFUSED
    deviations: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for answered in world.answered:
        request = traced_request(spans, answered.trace_id, answered.route)
        deviations[answered.kind].append(deviation(request, answered))
    # A busy machine adds gaps to some requests, a part without a span to all of a kind.
    assert {kind: min(found) for kind, found in deviations.items() if min(found) > TOLERANCE} == {}
    check_spans(receiver.spans_of("gateway"))
