"""One question is one trace: through a gateway and a real retriever to an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.otlp import Collector, attributes_of, collector
from ragcache_retriever.service import RetrieverService
from ragcache_wire.settings.gateway import EngineAddress
from ragcache_wire.telemetry import semantic_conventions as names
from ragcache_wire.tracing import tracer
from tests.kit.gateway import CONFIG, MODEL, FakeEngine, World, serving, world
from tests.kit.retriever import make_knowledge_base, tokenizer_of

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01", "tracestate": "vendor=7"}
QUESTION = "Wherever does xylophone billing run?"
ANSWER = "It runs in eu-north."
DOCUMENT = "Xylophone billing runs in quuxland."

ERROR = 2
"""OTLP's status code of a failed span."""


@dataclass
class Traces:
    """Spans that a collector got, by component; complete once the senders have stopped."""

    receiver: Collector

    def of(self, component: str) -> list[Any]:
        return self.receiver.spans_of(component)

    def one(self, component: str, name: str) -> Any:
        [span] = [span for span in self.of(component) if span.name == name]
        return span


@asynccontextmanager
async def traced(model: Path, traces: Traces, **changes: Any) -> AsyncGenerator[World, None]:
    async with world(model, otlp_endpoint=traces.receiver.url, **changes) as gateway:
        yield gateway


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with collector() as receiver:
        yield Traces(receiver)


async def ask(gateway: World, headers: dict[str, str], **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": QUESTION}], **more}
    return await gateway.client.post("/v1/chat/completions", json=body, headers=headers)


@dataclass
class Asked:
    """A question that was answered, and the headers that the engine got."""

    answer: httpx.Response
    prompt: list[int]
    engine_headers: dict[str, str]


async def ask_with_retriever(
    model: Path, folder: Path, traces: Traces, *, content: bool = False, **more: Any
) -> Asked:
    """Ask a gateway with a real retriever, both traced.

    Args:
        content: Whether spans have text.
        more: Fields of the question.
    """
    retriever_tracer = tracer(traces.receiver.url, "retriever", "here", exports_content=content)
    knowledge_base = make_knowledge_base(folder, tokenizer_of(model))
    async with AsyncExitStack() as stack:
        await knowledge_base.load()
        stack.push_async_callback(knowledge_base.close)
        service: Any = RetrieverService(knowledge_base, retriever_tracer)
        config = CONFIG.replace(otlp_endpoint=traces.receiver.url, trace_content=content)
        gateway = World(config, service)
        await gateway.start(stack, model)
        written = {"id": "a.md", "text": DOCUMENT}
        assert (await gateway.client.post("/v1/documents", json=written)).is_success
        answer = await ask(gateway, TRACED, **more)
        assert answer.status_code == 200, answer.text
        for path, body in (
            ("/v1/embeddings", {"input": [QUESTION, DOCUMENT]}),
            ("/v1/rerank", {"query": QUESTION, "documents": ["It is blue.", DOCUMENT]}),
        ):
            assert (await gateway.client.post(path, json=body, headers=TRACED)).is_success
        asked = Asked(answer, gateway.engine.requests[-1]["prompt"], gateway.engine.headers[-1])
    retriever_tracer.close()
    return asked


async def test_one_question_is_one_trace(tiny_model: Path, tmp_path: Path, traces: Traces) -> None:
    asked = await ask_with_retriever(tiny_model, tmp_path, traces)
    answer, engine_got = asked.answer, asked.engine_headers
    request = traces.one("gateway", "POST /v1/chat/completions")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE_ID, CALLER)
    assert request.trace_state == "vendor=7"
    attributes = attributes_of(request)
    assert attributes["http.request.method"] == "POST"
    assert attributes["http.route"] == attributes["url.path"] == "/v1/chat/completions"
    assert attributes["http.response.status_code"] == 200
    assert attributes["answer"] == answer.json()["id"]
    used = answer.json()["ragcache"]["cache"]
    for name in ("local_tokens", "loaded_tokens", "blended_tokens", "recomputed_tokens"):
        assert attributes[name] == used[name] != 0

    below = {name: traces.one("gateway", name) for name in ("retrieve", "tokenize", "engine")}
    assert {span.parent_span_id for span in below.values()} == {request.span_id}
    ends = [below[name].end_time_unix_nano for name in ("retrieve", "tokenize", "engine")]
    assert ends == sorted(ends)
    assert ends[-1] <= request.end_time_unix_nano
    tokenized = attributes_of(below["tokenize"])
    assert tokenized == {"chunks": 1, "prompt_tokens": len(asked.prompt), names.SPAN_KIND: "CHAIN"}
    assert attributes_of(below["engine"])["http.response.status_code"] == 200
    assert not below["engine"].events, "an answer in one piece does not tell when it began"
    parent = f"00-{TRACE_ID}-{below['engine'].span_id.hex()}-01"
    assert (engine_got["traceparent"], engine_got["tracestate"]) == (parent, "vendor=7")

    search = traces.one("retriever", "Search")
    assert search.trace_id.hex() == TRACE_ID
    assert search.parent_span_id == below["retrieve"].span_id
    assert attributes_of(search)["hits"] == 1
    assert {event.name for event in search.events} == {"stage"}
    assert "cancelled" not in attributes_of(search)

    # Spans contain no text of questions and documents.
    sent = b"".join(traces.receiver.bodies["/v1/traces"]).lower()
    assert b"xylophone" not in sent
    assert b"quuxland" not in sent


async def test_spans_have_the_names_of_both_conventions(
    tiny_model: Path, tmp_path: Path, traces: Traces
) -> None:
    asked = await ask_with_retriever(tiny_model, tmp_path, traces)
    request = traces.one("gateway", "POST /v1/chat/completions")
    assert attributes_of(request)[names.SPAN_KIND] == "CHAIN"

    span = traces.one("retriever", "Search")
    search = attributes_of(span)
    assert (search[names.SPAN_KIND], search[names.DATA_SOURCE_ID]) == ("RETRIEVER", "default")
    [document] = json.loads(search[names.RETRIEVAL_DOCUMENTS])
    assert document["id"] == search["retrieval.documents.0.document.id"] == "a.md#0"
    assert document["score"] == search["retrieval.documents.0.document.score"] > 0
    embed = traces.one("retriever", "embed")
    assert embed.parent_span_id == span.span_id
    assert attributes_of(embed)[names.SPAN_KIND] == "EMBEDDING"

    engine = attributes_of(traces.one("gateway", "engine"))
    assert (engine[names.SPAN_KIND], engine[names.OPERATION_NAME]) == ("LLM", "chat")
    assert engine[names.LLM_MODEL] == engine[names.REQUEST_MODEL] == MODEL
    num_tokens = len(asked.prompt)
    assert engine[names.LLM_PROMPT_TOKENS] == engine[names.USAGE_INPUT_TOKENS] == num_tokens
    assert engine[names.LLM_FINISH_REASON] == "stop"
    parameters = json.loads(engine[names.LLM_PARAMETERS])
    assert parameters["max_completion_tokens"] == engine[names.REQUEST_MAX_TOKENS] > 0

    plan = traces.one("gateway", "plan")
    assert plan.parent_span_id == traces.one("gateway", "tokenize").span_id
    assert attributes_of(plan)["considered"] >= 1

    embedded = traces.one("retriever", "Embed")
    assert attributes_of(embedded)[names.SPAN_KIND] == "EMBEDDING"
    assert attributes_of(embedded)[names.EMBEDDING_DIMENSION] > 0
    reranked = attributes_of(traces.one("retriever", "Rerank"))
    assert reranked[names.SPAN_KIND] == "RERANKER"
    order = [reranked[f"reranker.output_documents.{i}.document.id"] for i in range(2)]
    assert order == ["1", "0"]


@pytest.mark.parametrize("stream", [False, True])
async def test_spans_have_texts_where_that_is_set(
    tiny_model: Path, tmp_path: Path, traces: Traces, stream: bool
) -> None:
    await ask_with_retriever(tiny_model, tmp_path, traces, content=True, stream=stream)
    request = attributes_of(traces.one("gateway", "POST /v1/chat/completions"))
    assert (request[names.INPUT_VALUE], request[names.OUTPUT_VALUE]) == (QUESTION, ANSWER)
    engine = attributes_of(traces.one("gateway", "engine"))
    assert json.loads(engine[names.INPUT_VALUE]) == [{"role": "user", "content": QUESTION}]
    assert engine[names.OUTPUT_VALUE] == ANSWER
    search = attributes_of(traces.one("retriever", "Search"))
    assert search[names.INPUT_VALUE] == search[names.RETRIEVAL_QUERY] == QUESTION
    assert DOCUMENT in search[f"{names.RETRIEVED_DOCUMENTS}.0.{names.DOCUMENT_CONTENT}"]
    rerank = attributes_of(traces.one("retriever", "Rerank"))
    assert rerank[names.RERANKER_QUERY] == QUESTION
    assert rerank[f"{names.RERANKED_DOCUMENTS}.0.{names.DOCUMENT_CONTENT}"] == DOCUMENT


async def test_a_streams_span_lasts_as_long_as_the_stream(tiny_model: Path, traces: Traces) -> None:
    async with traced(tiny_model, traces) as gateway:
        answer = await ask(gateway, TRACED, stream=True)
        assert answer.text.endswith("data: [DONE]\n\n")
    request, engine = (
        traces.one("gateway", name) for name in ("POST /v1/chat/completions", "engine")
    )
    assert attributes_of(request)["loaded_tokens"] == 60
    [first] = engine.events
    assert first.time_unix_nano < engine.end_time_unix_nano <= request.end_time_unix_nano


async def test_a_disconnecting_client_ends_the_spans_of_the_stream(
    tiny_model: Path, traces: Traces
) -> None:
    async with traced(tiny_model, traces) as gateway:
        gateway.engine.hold_after = 1
        body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
        async with gateway.client.stream(
            "POST", "/v1/chat/completions", json=body, headers=TRACED
        ) as answer:
            await anext(answer.aiter_bytes())
            await asyncio.wait_for(gateway.engine.waiting.wait(), 60)
        await asyncio.wait_for(gateway.engine.aborted.wait(), 60)
    request = traces.one("gateway", "POST /v1/chat/completions")
    assert attributes_of(request)["cancelled"] is True
    assert attributes_of(request)["http.response.status_code"] == 200
    assert request.status.code != ERROR
    assert traces.one("gateway", "engine").end_time_unix_nano <= request.end_time_unix_nano


async def test_every_attempt_has_a_span(tiny_model: Path, traces: Traces) -> None:
    bad = FakeEngine()
    bad.drop_after = 0
    async with (
        serving(bad) as port,
        traced(tiny_model, traces, engines=(EngineAddress("127.0.0.1", port, 9),)) as gateway,
    ):
        async with asyncio.timeout(60):
            # Without reuse the engines take turns.
            while not bad.requests:
                answer = await ask(gateway, {}, ragcache={"reuse": "off"})
                assert answer.status_code == 200
    lost = [s for s in traces.of("gateway") if s.name == "engine" and s.status.code == ERROR]
    assert len(lost) == 1
    assert lost[0].status.message == "Unavailable: engine"
    siblings = [s for s in traces.of("gateway") if s.parent_span_id == lost[0].parent_span_id]
    engines = [s for s in siblings if s.name == "engine"]
    assert [s.status.code for s in engines] == [ERROR, 0]
    sent = [headers["traceparent"].split("-")[2] for headers in bad.headers]
    assert sent == [lost[0].span_id.hex()]
    assert gateway.engine.headers[-1]["traceparent"].split("-")[2] == engines[1].span_id.hex()


async def test_the_span_of_a_refused_request_has_the_reason(
    tiny_model: Path, traces: Traces
) -> None:
    async with traced(tiny_model, traces) as gateway:
        gateway.engine.refuse = (500, {"error": {"message": QUESTION}})
        assert (await ask(gateway, TRACED)).status_code == 503
        await ask(gateway, TRACED, max_tokens="hot")
        missing = await gateway.client.get("/v1/documents/x", headers=TRACED)
        assert missing.status_code == 404
    spans = {
        attributes_of(s)["http.response.status_code"]: s for s in traces.of("gateway") if _is_top(s)
    }
    assert spans[503].status.code == ERROR
    assert spans[503].status.message == "engine unavailable"
    # Wrong requests are not failures of the server.
    assert {code: spans[code].status.code for code in (400, 404)} == {400: 0, 404: 0}
    assert b"xylophone" not in b"".join(traces.receiver.bodies["/v1/traces"]).lower()


async def test_the_span_of_a_request_above_the_limit_has_the_reason(
    tiny_model: Path, traces: Traces
) -> None:
    async with traced(tiny_model, traces, max_questions=0) as gateway:
        assert (await ask(gateway, TRACED)).status_code == 429
    [span] = traces.of("gateway")
    assert span.name == "POST"
    assert span.status.code == ERROR
    assert "in flight" in span.status.message


async def test_a_failure_in_a_stream_marks_its_spans_as_failed(
    tiny_model: Path, traces: Traces
) -> None:
    async with traced(tiny_model, traces) as gateway:
        gateway.engine.fail_after = 1
        answer = await ask(gateway, TRACED, stream=True)
        assert "the engine died" in answer.text
    for name in ("POST /v1/chat/completions", "engine"):
        assert traces.one("gateway", name).status.code == ERROR


async def test_the_caller_decides_whether_a_request_is_traced(
    tiny_model: Path, traces: Traces
) -> None:
    async with traced(tiny_model, traces) as gateway:
        unsampled = {"traceparent": f"00-{TRACE_ID}-{CALLER}-00"}
        assert (await ask(gateway, unsampled)).status_code == 200
        assert "traceparent" not in gateway.engine.headers[-1]
        for path in ("/healthz", "/readyz", "/metrics"):
            await gateway.client.get(path, headers=TRACED)
        assert (await ask(gateway, {})).status_code == 200
    # Only the last request was traced; it begins a trace.
    request = traces.one("gateway", "POST /v1/chat/completions")
    assert request.parent_span_id == b""
    assert {span.trace_id for span in traces.of("gateway")} == {request.trace_id}


def _is_top(span: Any) -> bool:
    return bool(span.parent_span_id.hex() == CALLER)
