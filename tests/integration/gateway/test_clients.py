"""The clients of OpenAI's API and LangChain, unchanged, against a gateway with a fake engine."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from ragcache_core.cluster.sent_requests import SENT_FIELD
from ragcache_core.plan.reuse_plan import NO_REUSE
from tests.kit.gateway import MODEL, World, band_of, plan_of, world

ASK: Any = [{"role": "user", "content": "Where does billing run?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL: dict[str, Any] = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "north"}'},
}


@pytest.fixture
async def client(gateway: World) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    base_url = f"{gateway.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as found:
        yield found


async def test_several_answers_share_one_plan(gateway: World, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=ASK, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    (sent,) = gateway.engine.requests
    assert (sent["n"], len(gateway.records.asked)) == (3, 1)
    stream = await client.chat.completions.create(model=MODEL, messages=ASK, n=3, stream=True)
    texts, ended = ["", "", ""], set()
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ended.add(choice.index)
    assert texts == ["It runs in eu-north."] * 3
    assert ended == {0, 1, 2}


async def test_tool_calls_come_whole_and_streamed_and_go_back(
    gateway: World, client: openai.AsyncOpenAI
) -> None:
    gateway.engine.message = {"tool_calls": [CALL]}
    answer = await client.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL])
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].type == "function"
    assert json.loads(calls[0].function.arguments) == {"at": "north"}
    assert gateway.engine.requests[0]["tools"] == [TOOL]
    stream = await client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[TOOL], stream=True
    )
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert [one.tool_calls[0].id for one in deltas if one.tool_calls] == ["call_1"]
    history = [
        *ASK,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": "call_1", "content": "ice"},
    ]
    gateway.engine.message = {}
    again = await client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL])
    assert again.choices[0].finish_reason == "stop"
    # A search for the tool's result would find other documents, and no KV could be used again.
    assert [one.query for one in gateway.retriever.searches] == [ASK[0]["content"]] * 3


class Location(BaseModel):
    """Where something is."""

    region: str


async def test_a_refusal_of_the_engine_has_its_message_and_field(
    gateway: World, client: openai.AsyncOpenAI
) -> None:
    refusal = {"message": "top_k must be -1 or more", "param": "top_k", "code": 400}
    gateway.engine.refuse = (400, {"error": refusal})
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL, messages=ASK, extra_body={"top_k": -7}, stream=True
        )
    assert caught.value.param == "top_k"
    assert "top_k must be -1 or more" in str(caught.value)


async def test_an_answer_without_retrieval_keeps_the_head_as_a_segment(
    gateway: World, client: openai.AsyncOpenAI
) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, *ASK]
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages, extra_body={"ragcache": {"retrieve": False}}
    )
    assert gateway.retriever.searches == []
    extension = answer.to_dict()["ragcache"]
    assert isinstance(extension, dict)
    assert (extension["citations"], extension["queries"]) == ([], [])
    (sent,) = gateway.engine.requests
    plan = plan_of(sent)
    (head,) = plan.segments
    assert 0 < head.end < len(sent["prompt"])


async def test_a_long_message_and_many_messages_are_answered(tiny_model: Path) -> None:
    async with world(tiny_model, max_model_len=65_536) as gateway:
        long = "Some log line.\n" * 1500 + "Where does billing run?"
        assert len(long) > 20_000
        assert (await gateway.ask(long)).status_code == 200
        query = gateway.retriever.searches[0].query
        assert len(query) <= 2000
        assert query.endswith("Where does billing run?")
        turns = [{"role": ("user", "assistant")[i % 2], "content": "hello"} for i in range(1601)]
        body = {"messages": turns}
        assert (await gateway.client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_follow_up_is_searched_with_the_topic(gateway: World) -> None:
    turns = [
        {"role": "user", "content": "Where does the billing service run?"},
        {"role": "assistant", "content": "It runs in eu-north."},
        {"role": "user", "content": "And who owns it?"},
    ]

    async def query(**options: Any) -> str:
        body = {"messages": turns, "ragcache": options}
        response = await gateway.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
        searched: str = gateway.retriever.searches[-1].query
        assert response.json()["ragcache"]["queries"] == [searched]
        return searched

    assert await query(rewrite="off") == "And who owns it?"
    by_rules = await query()
    assert by_rules.startswith("And who owns it?")
    assert "billing service" in by_rules
    gateway.engine.query = '"owner of the billing service"'
    assert await query(rewrite="model") == "owner of the billing service"
    gateway.engine.query = ""
    assert await query(rewrite="model") == by_rules


async def test_the_model_may_ask_for_another_search(gateway: World) -> None:
    gateway.engine.query = "billing owner"
    response = await gateway.ask(ragcache={"max_searches": 3})
    # The same query again would find the same.
    assert response.json()["ragcache"]["queries"] == ["Where does billing run?", "billing owner"]
    assert len(gateway.retriever.searches) == 2
    asking, _, answering = gateway.engine.requests
    plan = plan_of(asking)
    end = plan.segments[-1].end
    assert asking["prompt"][:end] == answering["prompt"][:end], "the question's KV is reused"
    gateway.engine.query = "NONE"
    await gateway.ask(ragcache={"max_searches": 3})
    assert len(gateway.retriever.searches) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_reach_the_engine_as_they_are(
    gateway: World, client: openai.AsyncOpenAI, stream: bool
) -> None:
    wanted: Any = {"model": MODEL, "prompt": "It runs", "max_tokens": 5, "stream": stream}
    found = await client.completions.create(**wanted)
    if stream:
        text = "".join([chunk.choices[0].text async for chunk in found])
    else:
        text = found.choices[0].text
        assert found.id.startswith("cmpl-")
    assert text == "It runs in eu-north."
    (sent,) = gateway.engine.requests
    sent.pop("stream_options", None)
    # Its place in the engine's queue.
    assert set(sent.pop("kv_transfer_params")) == {SENT_FIELD}
    assert band_of(sent) == 0
    del sent["priority"]
    assert sent == wanted
    assert gateway.retriever.searches == []


@pytest.mark.parametrize("options", [{"reuse": "off"}, {"trial": True}])
async def test_a_completion_without_reuse_leaves_nothing_in_an_engine(
    gateway: World, client: openai.AsyncOpenAI, options: dict[str, Any]
) -> None:
    salts = []
    for _ in range(2):
        await client.completions.create(
            model=MODEL,
            prompt="It runs",
            max_tokens=5,
            extra_body={"ragcache": {"retrieve": False, **options}},
        )
        sent = gateway.engine.requests[-1]
        assert sent["kv_transfer_params"]["ragcache"] == NO_REUSE
        salts.append(sent["cache_salt"])
    assert len(set(salts)) == 2, "no request finds the blocks of another one"


async def test_completions_retrieve_if_asked_to(gateway: World, client: openai.AsyncOpenAI) -> None:
    found = await client.completions.create(
        model=MODEL, prompt="Billing runs in", extra_body={"ragcache": {"top_k": 2}}
    )
    extension = found.to_dict()["ragcache"]
    assert isinstance(extension, dict)
    assert len(extension["citations"]) == 2
    (sent,) = gateway.engine.requests
    plan = plan_of(sent)
    assert [segment.document for segment in plan.segments][-1] == "default/search.md"
    assert sent["prompt"][plan.segments[-1].end :], "the text follows the chunks"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_a_completion(gateway: World, stream: bool) -> None:
    gateway.engine.hold_after = 1
    body = {"prompt": "x", "stream": stream}
    asking = asyncio.create_task(gateway.client.post("/v1/completions", json=body))
    await asyncio.wait_for(gateway.engine.waiting.wait(), 60)
    asking.cancel()
    await asyncio.wait_for(gateway.engine.aborted.wait(), 60)


async def test_embeddings_are_the_retrievers(client: openai.AsyncOpenAI) -> None:
    # The client asks for base64 by itself.
    found = await client.embeddings.create(model="ragcache-embedder", input=["abc", "de"])
    assert [one.embedding for one in found.data] == [[3.0, 1.0], [2.0, 1.0]]
    numbers = await client.embeddings.create(model=MODEL, input="abc", encoding_format="float")
    assert numbers.data[0].embedding == [3.0, 1.0]
    assert numbers.usage.prompt_tokens > 0
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="other", input="x")
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        await client.embeddings.create(model=MODEL, input="x", dimensions=3)


async def test_texts_are_reranked(gateway: World) -> None:
    body = {
        "query": "where billing runs",
        "documents": ["nothing", {"text": "billing runs here"}, "billing"],
        "top_n": 2,
    }
    answer = (await gateway.client.post("/v1/rerank", json=body)).json()
    assert [one["index"] for one in answer["results"]] == [1, 2]
    assert answer["results"][0]["document"] == {"text": "billing runs here"}


async def test_models_are_listed_and_found(client: openai.AsyncOpenAI) -> None:
    names = [one.id async for one in client.models.list()]
    assert names == [MODEL]
    others = [one.id async for one in client.models.list(extra_query={"kind": "embedding"})]
    assert others == ["ragcache-embedder"]
    every = [one.id async for one in client.models.list(extra_query={"kind": "all"})]
    assert every == [MODEL, "ragcache-embedder", "ragcache-reranker"]
    assert (await client.models.retrieve("ragcache-embedder")).to_dict()["kind"] == "embedding"
    assert (await client.models.retrieve(MODEL)).created > 1_700_000_000
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_a_base_url_may_end_with_slashes(gateway: World) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.base_url}//v1/", api_key="none") as client:
        assert [one.id async for one in client.models.list()] == [MODEL]
    for path in ("/v1//models", "//v1//models", "//health", "/health"):
        assert (await gateway.client.get(gateway.base_url + path)).status_code == 200


async def test_a_response_has_text_usage_and_citations(
    gateway: World, client: openai.AsyncOpenAI
) -> None:
    found = await client.responses.create(
        model=MODEL, instructions="Be brief.", input="Where does billing run?", max_output_tokens=9
    )
    assert found.output_text == "It runs in eu-north."
    assert found.status == "completed"
    assert found.usage is not None
    assert found.usage.output_tokens == 3
    assert found.to_dict()["ragcache"]["citations"]  # type: ignore[index]
    (sent,) = gateway.engine.requests
    assert sent["max_completion_tokens"] == 9
    assert [one["role"] for one in sent["messages"]] == ["system", "user"]


async def test_a_streamed_response_has_the_events_of_openai(
    gateway: World, client: openai.AsyncOpenAI
) -> None:
    gateway.engine.message = {"tool_calls": [CALL]}
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    async with client.responses.stream(model=MODEL, input=ASK, tools=[tool]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(numbers)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert final.output_text == "It runs in eu-north."
    message, call = final.output
    assert (message.type, call.type) == ("message", "function_call")
    assert call.arguments == '{"at": "north"}'  # type: ignore[union-attr]
    assert gateway.engine.requests[0]["tools"][0]["function"]["name"] == "look"


async def test_a_response_goes_on_with_a_tools_output(
    gateway: World, client: openai.AsyncOpenAI
) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "ice"},
    ]
    await client.responses.create(model=MODEL, input=items)
    roles = [one["role"] for one in gateway.engine.requests[0]["messages"]]
    assert roles == ["user", "assistant", "tool"]


@pytest.fixture
async def http_client() -> AsyncGenerator[httpx.AsyncClient, None]:
    """LangChain closes no connections of its own."""
    async with httpx.AsyncClient(timeout=60) as found:
        yield found


@pytest.fixture
def chain(gateway: World, http_client: httpx.AsyncClient) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{gateway.base_url}/v1",
        api_key="none",  # type: ignore[arg-type]
        model=MODEL,
        http_async_client=http_client,
    )


async def test_langchain_invokes_and_streams(chain: ChatOpenAI) -> None:
    answer = await chain.ainvoke("Where does billing run?")
    assert answer.content == "It runs in eu-north."
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] > 0
    parts = [part.content async for part in chain.astream("Where does billing run?")]
    assert "".join(map(str, parts)) == "It runs in eu-north."


async def test_langchain_gets_structured_output_and_tool_calls(
    gateway: World, chain: ChatOpenAI
) -> None:
    gateway.engine.words = ['{"region": ', '"north"}']
    assert await chain.with_structured_output(Location).ainvoke("Where?") == Location(
        region="north"
    )
    gateway.engine.message = {"tool_calls": [CALL]}
    answer = await chain.bind_tools([TOOL]).ainvoke("Where?")
    assert answer.tool_calls[0]["args"] == {"at": "north"}


async def test_langchain_embeds(gateway: World, http_client: httpx.AsyncClient) -> None:
    embeddings = OpenAIEmbeddings(
        base_url=f"{gateway.base_url}/v1",
        api_key="none",  # type: ignore[arg-type]
        model="ragcache-embedder",
        http_async_client=http_client,
        check_embedding_ctx_length=False,  # else it sends token ids of an OpenAI model
    )
    assert await embeddings.aembed_documents(["abc", "de"]) == [[3.0, 1.0], [2.0, 1.0]]


GUIDE = Path(__file__).resolve().parents[3] / "docs" / "api.md"


async def test_the_examples_of_the_guide_run(gateway: World, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    program = tmp_path / "examples.py"
    settings = f"url, model = {gateway.base_url!r}, {MODEL!r}\n"
    program.write_text(settings + "\n".join(blocks))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), stdout=pipe, stderr=pipe
    )
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    assert output.decode().count("It runs in eu-north.") == 3
    assert "billing.md 0.9" in output.decode()
