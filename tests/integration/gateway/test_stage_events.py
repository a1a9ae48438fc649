"""Events that say what happens before the first token of an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragcache_wire.v1 import retriever_pb2
from tests.integration.gateway.test_speculation import ANSWER, hit, speculating
from tests.kit.gateway import HeldStage, World, chunk, data_of

QUESTION = {"messages": [{"role": "user", "content": "Where does billing run?"}], "stream": True}
STAGED = {**QUESTION, "ragcache": {"events": True}}


class Events:
    """The events of a stream, as (name, data); the name of an event of the answer is empty."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._texts = response.aiter_text()
        self._rest = ""

    async def next(self) -> tuple[str, Any]:
        while "\n\n" not in self._rest:
            self._rest += await anext(self._texts)
        block, self._rest = self._rest.split("\n\n", 1)
        name, line = "", block
        if block.startswith("event: "):
            first, line = block.split("\n", 1)
            name = first.removeprefix("event: ")
        return name, parsed(line.removeprefix("data: "))

    async def stage(self) -> dict[str, Any]:
        name, data = await self.next()
        assert name == "ragcache.stage", data
        found: dict[str, Any] = data
        return found

    async def stages(self, *stages: str) -> list[dict[str, Any]]:
        """Read as many stages, which have these names."""
        found = [await self.stage() for _ in stages]
        assert [one["stage"] for one in found] == list(stages)
        return found

    async def rest(self) -> list[Any]:
        """Read the data of the events up to the end of the answer."""
        found: list[Any] = []
        while not found or found[-1] != "[DONE]":
            name, data = await self.next()
            assert name == ""
            found.append(data)
        return found


def parsed(data: str) -> Any:
    return data if data == "[DONE]" else json.loads(data)


def parse_all(stream: str) -> list[tuple[str, Any]]:
    """Parse a whole stream."""
    found = []
    for block in filter(None, stream.split("\n\n")):
        *first, line = block.split("\n")
        name = first[0].removeprefix("event: ") if first else ""
        found.append((name, parsed(line.removeprefix("data: "))))
    return found


@asynccontextmanager
async def asked(gateway: World, body: Any = STAGED) -> AsyncIterator[Events]:
    async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        yield Events(response)


def answer_of(events: list[Any]) -> str:
    choices = [event["choices"] for event in events if event != "[DONE]"]
    return "".join(one[0]["delta"].get("content") or "" for one in choices if one)


async def test_stages_come_while_the_search_and_the_engine_are_still_at_work(
    gateway: World,
) -> None:
    gateway.retriever.hold = asyncio.Event()
    gateway.engine.prefill = asyncio.Event()
    async with asked(gateway) as events:
        begun, early = await events.stages("search_begun", "search")
        assert begun["search"] == early["search"] == 1
        assert (early["hits"], early["progress"], early["final"]) == (1, 0.5, False)
        assert gateway.engine.requests == []
        gateway.retriever.hold.set()
        final, plan, accepted = await events.stages("search", "plan", "engine")
        assert (final["hits"], final["final_probability"], final["final"]) == (2, 1.0, True)
        chunks = [part["chunk"] for part in plan["parts"] if part["chunk"]]
        assert chunks == ["billing.md#0", "billing.md#1", "search.md#0"]
        assert {part["planned"] for part in plan["parts"]} == {"compute"}
        assert 0 < sum(part["tokens"] for part in plan["parts"]) < plan["prompt_tokens"]
        assert accepted["engine"] == plan["engine"] != ""
        await gateway.engine.waiting.wait()
        gateway.engine.prefill.set()
        [first_token] = await events.stages("first_token")
        rest = await events.rest()
    times = [one["elapsed_ms"] for one in (begun, early, final, plan, accepted, first_token)]
    assert times == sorted(times)
    assert answer_of(rest) == "".join(gateway.engine.words)
    assert "citations" in rest[0]["ragcache"]


async def test_without_the_option_a_stream_has_no_named_event(gateway: World) -> None:
    response = await gateway.client.post("/v1/chat/completions", json=QUESTION)
    assert "event:" not in response.text
    plain = data_of(response.text)
    async with asked(gateway) as events:
        name, data = await events.next()
        while name:
            name, data = await events.next()
        rest = [data, *await events.rest()]
    assert answer_of(rest) == answer_of(plain)
    assert [set(one) for one in rest[:-1]] == [set(one) for one in plain[:-1]]


async def test_stages_have_no_text_of_the_answer_or_of_documents(gateway: World) -> None:
    gateway.engine.words = ["Entirely ", "distinctive."]
    async with asked(gateway) as events:
        found: list[dict[str, Any]] = []
        while not found or found[-1]["stage"] != "first_token":
            found.append(await events.stage())
        await events.rest()
    said = json.dumps(found)
    texts = [hit.chunk.text for hit in gateway.retriever.hits]
    titles = [hit.chunk.title for hit in gateway.retriever.hits]
    for text in (*texts, *titles, *gateway.engine.words, "Where does billing"):
        assert text not in said


async def test_a_guess_is_told_from_its_start_to_its_outcome(tiny_model: Path) -> None:
    async with speculating(tiny_model) as gateway:
        hits = gateway.retriever.hits
        stages = [HeldStage(hits, 0.9), HeldStage(hits, 0.9)]
        gateway.retriever.stages = stages
        async with asked(gateway) as events:
            await events.stages("search_begun", "search")
            [started] = await events.stages("guess")
            assert (started["outcome"], started["tokens"] > 0) == ("started", True)
            stages[0].go_on.set()
            _, kept = await events.stages("search", "guess")
            assert kept["outcome"] == "kept"
            stages[1].go_on.set()
            names: list[tuple[str, str | None]] = []
            while not names or names[-1][0] != "first_token":
                one = await events.stage()
                names.append((one["stage"], one.get("outcome")))
            assert names == [
                ("search", None),
                ("guess", "confirmed"),
                ("plan", None),
                ("engine", None),
                ("first_token", None),
            ]
            assert answer_of(await events.rest()) == ANSWER


async def test_a_cancelled_guess_is_told(tiny_model: Path) -> None:
    async with speculating(tiny_model) as gateway:
        stages = [HeldStage([hit("one"), hit("three")], 0.9), HeldStage([hit("two")], 0.01)]
        gateway.retriever.stages = stages
        async with asked(gateway) as events:
            await events.stages("search_begun", "search")
            [started] = await events.stages("guess")
            stages[0].go_on.set()
            _, cancelled = await events.stages("search", "guess")
            assert cancelled["outcome"] == "cancelled"
            assert cancelled["tokens"] == started["tokens"]
            stages[1].go_on.set()
            _, ended = await events.stages("search", "guess")
            assert ended["outcome"] == "wrong"


async def test_an_error_before_the_search_is_a_status(gateway: World) -> None:
    body = {**STAGED, "model": "other"}
    response = await gateway.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 404


async def test_a_later_error_is_the_last_event_and_ends_the_stream(gateway: World) -> None:
    gateway.engine.refuse = (400, {"error": {"message": "too long", "code": 400}})
    response = await gateway.client.post("/v1/chat/completions", json=STAGED)
    assert response.status_code == 200
    events = parse_all(response.text)
    assert [name for name, _ in events[:-1]] == ["ragcache.stage"] * (len(events) - 1)
    name, last = events[-1]
    assert name == ""
    assert "too long" in last["error"]["message"]


async def test_a_guess_that_is_abandoned_writes_nothing_after_the_end(tiny_model: Path) -> None:
    """It ends after the response, whose connection another request may have by then."""
    async with speculating(tiny_model) as gateway:
        stage = HeldStage(gateway.retriever.hits, 0.9)
        gateway.retriever.stages = [stage]
        # No chunk of the final stage fits the prompt.
        too_long = chunk("long.md", 0, "a word " * 4096)
        gateway.retriever.hits = [retriever_pb2.Hit(chunk=too_long, score=0.9)]
        gateway.engine.hold_prefills = asyncio.Event()
        async with asked(gateway) as events:
            await events.stages("search_begun", "search", "guess")
            stage.go_on.set()
            await events.stages("search")
            name, last = await events.next()
            assert (name, last["error"]["param"]) == ("", "max_tokens")
            with pytest.raises(StopAsyncIteration):
                await events.next()
        assert (await gateway.client.get("/healthz")).status_code == 200


async def test_a_text_completion_has_the_same_stages(gateway: World) -> None:
    body = {"prompt": "Where?", "stream": True, "ragcache": {"events": True}}
    events = parse_all((await gateway.client.post("/v1/completions", json=body)).text)
    stages = [data["stage"] for name, data in events if name]
    assert stages == ["search_begun", "search", "search", "plan", "engine", "first_token"]
    assert events[-1] == ("", "[DONE]")


async def test_the_document_of_the_api_names_the_events(gateway: World) -> None:
    api = (await gateway.client.get("/openapi.json")).json()
    content = api["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    named = content["text/event-stream"]["x-named-event-data"]
    assert named == {"ragcache.stage": {"$ref": "#/components/schemas/StageEvent"}}
    stages = api["components"]["schemas"]["StageEvent"]["discriminator"]["mapping"]
    assert set(stages) == {"search_begun", "search", "guess", "plan", "engine", "first_token"}
    assert {name.rsplit("/", 1)[1] for name in stages.values()} <= set(api["components"]["schemas"])
