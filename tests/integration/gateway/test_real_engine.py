"""Clients unchanged, against a gateway process with a real vLLM engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from harness.processes import (
    Engine,
    Service,
    free_port,
    running_cachestore,
    running_engine,
)
from ragcache_wire.server import GrpcServer
from ragcache_wire.v1 import retriever_pb2_grpc
from tests.kit.gateway import FakeRetriever
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[3]
LLAMA_INDEX = ROOT / ".venv-llama-index" / "bin" / "python"
"""A Python of its own: LlamaIndex needs an older openai package than vLLM. See docs/api.md."""

ASK: Any = [{"role": "user", "content": "Where does billing run?"}]
NAMES = ("north", "south")
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks into a region.",
        "strict": True,  # else a model of random weights writes any JSON
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "enum": list(NAMES)}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
CHOICE: Any = {"type": "function", "function": {"name": "look"}}
GREEDY: Any = {"temperature": 0, "max_tokens": 64}
CALLING: Any = {"temperature": 0, "max_tokens": 250}


class Location(BaseModel):
    """Where something is."""

    region: Literal["north", "south"]


@dataclass(frozen=True)
class Platform:
    """A gateway process and its engine."""

    url: str
    engine: Engine

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def num_unfinished(self) -> float:
        """Return the number of requests that run or wait in the engine."""
        return self._sum("vllm:num_requests_running", "vllm:num_requests_waiting{")

    def num_generated(self) -> float:
        """Return the number of tokens that the engine has generated."""
        return self._sum("vllm:generation_tokens_total")

    def _sum(self, *names: str) -> float:
        text = httpx.get(f"{self.engine.url}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if line.startswith(names)]
        assert lines
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def wait_for_unfinished(self, wanted: int) -> None:
        wait_until(lambda: self.num_unfinished() == wanted)


class RetrieverThread:
    """A fake retriever with an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    async def _start(self) -> GrpcServer:
        # It has what the gateway calls.
        fake = FakeRetriever()

        def register(server: Any) -> None:
            retriever_pb2_grpc.add_RetrieverServicer_to_server(fake, server)

        server = GrpcServer("127.0.0.1:0", ["ragcache.v1.Retriever"], register)
        await server.start()
        await server.set_ready()
        return server

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def platform(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("platform")
    retriever = RetrieverThread()
    arguments = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
    try:
        with (
            running_cachestore(folder / "store") as store,
            running_engine(folder, tiny_model, store.address, *arguments) as engine,
        ):
            port = free_port()
            assert engine.records is not None
            settings = {
                "RAGCACHE_LISTEN": f"127.0.0.1:{port}",
                "RAGCACHE_RETRIEVER": retriever.address,
                "RAGCACHE_ENGINES": f"{engine.url};records={engine.records.rpartition(':')[2]}",
                "RAGCACHE_CACHESTORE": store.address,
                "RAGCACHE_MODEL": str(tiny_model),
                "RAGCACHE_MODEL_NAME": "model",
                "RAGCACHE_MAX_MODEL_LEN": "4096",
            }
            command = [sys.executable, "-m", "ragcache_gateway"]
            gateway = Service("gateway", command, settings, folder / "gateway.log")
            try:
                url = f"http://127.0.0.1:{port}"
                gateway.wait_until("ready", lambda: is_answering(url))
                yield Platform(url, engine)
            finally:
                gateway.stop()
    finally:
        retriever.stop()


def is_answering(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/status", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def _num_cached(answer: ChatCompletion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_chats_have_the_text_of_the_answer_alone_and_reuse_their_prompt(
    platform: Platform,
) -> None:
    short: Any = {"temperature": 0, "max_tokens": 2}
    create = platform.client.chat.completions.create
    first = create(model="model", messages=ASK, **short)
    again = create(model="model", messages=ASK, **short)
    for _ in range(100):
        if _num_cached(again):
            break
        time.sleep(0.1)  # the engine stores what it has computed after it has answered
        again = create(model="model", messages=ASK, **short)
    assert first.choices[0].message.content == again.choices[0].message.content
    assert len(first.choices[0].message.content or "") < 40, "no part of the prompt"
    assert again.usage is not None
    assert again.usage.completion_tokens == 2
    assert _num_cached(again) > 0
    tokens = again.usage.to_dict()["ragcache"]
    assert isinstance(tokens, dict)
    assert sum(tokens.values()) == again.usage.prompt_tokens
    assert tokens["computed_tokens"] < again.usage.prompt_tokens
    # The plan has matched the prompt: nothing was refused.
    cache = again.to_dict()["ragcache"]["cache"]
    assert "plan" not in (cache["miss"] or "")


def test_a_stream_has_the_text_of_the_whole_answer(platform: Platform) -> None:
    create = platform.client.chat.completions.create
    whole = create(model="model", messages=ASK, **GREEDY)
    usage: Any = {"include_usage": True}
    chunks = list(create(model="model", messages=ASK, stream=True, stream_options=usage, **GREEDY))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].to_dict()["ragcache"]["citations"]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].to_dict()["ragcache"]["timing_ms"]


def test_a_forced_tool_is_called_whole_and_streamed(platform: Platform) -> None:
    create = platform.client.chat.completions.create
    wanted: Any = {"model": "model", "messages": ASK, "tools": [TOOL], "tool_choice": CHOICE}
    calls = create(**wanted, **CALLING).choices[0].message.tool_calls
    assert calls is not None
    assert json.loads(calls[0].function.arguments)["at"] in NAMES
    arguments = ""
    for chunk in create(**wanted, **CALLING, stream=True):
        for call in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
            arguments += (call.function and call.function.arguments) or ""
    assert json.loads(arguments) == json.loads(calls[0].function.arguments)
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [calls[0].to_dict()]},
        {"role": "tool", "tool_call_id": calls[0].id, "content": "ice"},
    ]
    again = create(model="model", messages=history, tools=[TOOL], **GREEDY)
    assert again.choices[0].finish_reason in ("stop", "length")


def test_structured_output_follows_its_schema(platform: Platform) -> None:
    parsed = platform.client.chat.completions.parse(
        model="model", messages=ASK, response_format=Location, **GREEDY
    )
    assert parsed.choices[0].message.parsed is not None
    assert parsed.choices[0].message.parsed.region in NAMES


def test_several_answers_have_log_probabilities_and_a_seed(platform: Platform) -> None:
    wanted: Any = {
        "model": "model",
        "messages": ASK,
        "n": 2,
        "seed": 5,
        "temperature": 1.0,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"min_p": 0.01, "top_k": 40, "logit_bias": {"7": -100}},
    }
    first, again = (platform.client.chat.completions.create(**wanted) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(texts) == 2
    assert texts == [choice.message.content for choice in again.choices]
    for choice in first.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(token.top_logprobs) >= 2 for token in choice.logprobs.content)


def test_what_vllm_refuses_is_refused_with_its_field(platform: Platform) -> None:
    for fields, param in (
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
    ):
        wanted: Any = {"model": "model", "messages": ASK, **fields}
        with pytest.raises(openai.BadRequestError) as caught:
            platform.client.chat.completions.create(**wanted)
        assert caught.value.param == param


def test_an_answer_without_retrieval_is_that_of_plain_vllm(platform: Platform) -> None:
    wanted: Any = {"model": "model", "messages": ASK, **GREEDY}
    plain = platform.client.chat.completions.create(
        **wanted, extra_body={"ragcache": {"retrieve": False}}
    )
    with openai.OpenAI(base_url=f"{platform.engine.url}/v1", api_key="none") as engine:
        direct = engine.chat.completions.create(**wanted)
    assert plain.choices[0].message.content == direct.choices[0].message.content
    assert plain.usage is not None
    assert direct.usage is not None
    assert plain.usage.prompt_tokens == direct.usage.prompt_tokens


def test_completions_come_whole_and_streamed(platform: Platform) -> None:
    create = platform.client.completions.create
    wanted: Any = {"model": "model", "prompt": "The service runs", "logprobs": 1, **GREEDY}
    whole = create(**wanted)
    parts = [chunk.choices[0].text for chunk in create(**wanted, stream=True) if chunk.choices]
    assert "".join(parts) == whole.choices[0].text
    retrieved = create(**wanted, extra_body={"ragcache": {"top_k": 2}})
    assert retrieved.to_dict()["ragcache"]["citations"]


def test_responses_come_whole_and_streamed(platform: Platform) -> None:
    wanted: Any = {"model": "model", "input": "Where?", "temperature": 0, "max_output_tokens": 16}
    whole = platform.client.responses.create(**wanted)
    assert whole.status == "incomplete"
    with platform.client.responses.stream(**wanted) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == whole.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_engines_work(platform: Platform, stream: bool) -> None:
    body: dict[str, Any] = {
        "messages": ASK,
        "stream": stream,
        "max_tokens": 3000,
        "ignore_eos": True,
        "temperature": 0,
    }

    async def leave(after_s: float) -> None:
        async with httpx.AsyncClient(base_url=platform.url, timeout=60) as client:
            if stream:
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    await anext(response.aiter_raw())
                return
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await asyncio.wait((asking,), timeout=after_s)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    num_generated = 0.0
    # An engine can be fast or slow, and a busy one sees late that the client has left.
    for after_s in (0.5, 0.25, 1.0, 0.5, 2.0, 0.25, 4.0, 1.0):
        platform.wait_for_unfinished(0)
        before = platform.num_generated()
        asyncio.run(leave(after_s))
        platform.wait_for_unfinished(0)
        num_generated = platform.num_generated() - before
        if 0 < num_generated < body["max_tokens"]:
            break
    assert 0 < num_generated < body["max_tokens"]


def test_langchain_calls_tools_and_gets_structured_output(platform: Platform) -> None:
    with httpx.Client(timeout=60) as http_client:
        chain = ChatOpenAI(
            base_url=f"{platform.url}/v1",
            api_key="none",  # type: ignore[arg-type]
            model="model",
            temperature=0,
            max_tokens=250,  # type: ignore[call-arg]
            http_client=http_client,
        )
        assert chain.invoke("Where does billing run?").content
        assert "".join(str(part.content) for part in chain.stream("Where does billing run?"))
        location = chain.with_structured_output(Location).invoke("Where does billing run?")
        assert isinstance(location, Location)
        answer = chain.bind_tools([TOOL], tool_choice="look", strict=True).invoke("Where?")
        assert answer.tool_calls[0]["args"]["at"] in NAMES


def test_a_langchain_retriever_of_the_client_has_its_kv_reused(platform: Platform) -> None:
    questions = ["Where does billing run?"] * 2
    command = [sys.executable, "examples/clients/langchain_retriever.py", platform.url, "model"]
    done = subprocess.run(
        [*command, *questions], capture_output=True, text=True, timeout=240, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found = [
        re.match(r"(\d+) prompt tokens, (\d+) reused", one) for one in done.stdout.splitlines()
    ]
    sizes = [(int(one[1]), int(one[2])) for one in found if one]
    assert len(sizes) == len(questions)
    # At first no more than the head. Then all but the question, in whole blocks of vLLM's cache.
    (_, at_first), (tokens, reused) = sizes
    assert at_first < reused, sizes
    assert tokens - reused < 48, sizes


LLAMA_INDEX_PROGRAM = """
import sys
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    api_base=sys.argv[1], api_key="none", model="model", is_chat_model=True, max_tokens=16,
    temperature=0, context_window=4096,
)
messages = [ChatMessage(role="user", content="Where does billing run?")]
whole = llm.chat(messages).message.content
*_, last = llm.stream_chat(messages)
assert whole and last.message.content == whole, (whole, last)
assert llm.complete("Where?").text
"""


@pytest.mark.skipif(not LLAMA_INDEX.exists(), reason="make llama-index has not been run")
def test_llama_index_chats_and_streams(platform: Platform) -> None:
    command = [str(LLAMA_INDEX), "-c", LLAMA_INDEX_PROGRAM, f"{platform.url}/v1"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asyncio.run(_run(command, env))


async def _run(command: list[str], env: dict[str, str]) -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=env, stdout=pipe, stderr=pipe)
    _, log = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, log.decode()
