"""Answers through real sockets: responses, calls to the other components, and cancellation."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragcache_core.plan.reuse_plan import Action
from ragcache_core.plan.segments import checked_segments
from ragcache_core.plan.signature import is_timely, signed_until_s
from ragcache_gateway.chat.schema import ChatCompletion, ChatCompletionChunk
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.v1 import engine_pb2, retriever_pb2
from ragcache_wire.watched.signing_keys import SigningKeys
from ragcache_wire.watched.watched_file import CHECK_EVERY_S
from tests.kit.gateway import MODEL, FakeEngine, World, chunk, data_of, plan_of, serving, world

CACHE = {
    "prompt_tokens": 100,
    "local_tokens": 10,
    "loaded_tokens": 60,
    "loaded_bytes": 61440,
    "blended_tokens": 20,
    "recomputed_tokens": 5,
    "miss": "",
}


async def test_a_complete_answer_has_text_citations_timing_and_cache(gateway: World) -> None:
    response = await gateway.ask(model=MODEL)
    assert response.status_code == 200
    answer = response.json()
    ChatCompletion.model_validate(answer)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"]["content"] == "It runs in eu-north."
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 70}
    assert answer["usage"]["ragcache"] == {
        "cached_tokens": 10,
        "loaded_tokens": 40,
        "blended_tokens": 15,
        "recomputed_tokens": 5,
        "computed_tokens": 30,
    }
    first, second = answer["ragcache"]["citations"]
    assert first == {
        "document_id": "billing.md",
        "title": "Title of billing.md",
        "chunk": "billing.md#1",
        "heading_path": ["Handbook", "billing.md"],
        "page": 3,
        "page_end": 4,
        "score": 0.9,
        "version": "hash of billing.md",
        "updated": "2023-11-14T22:13:20.000Z",
        "text_preview": "Chunk 1 of billing.md.",
    }
    assert second["document_id"] == "search.md"
    assert answer["ragcache"]["cache"] == CACHE
    timing = answer["ragcache"]["timing_ms"]
    assert (timing["stages"], timing["embed"], timing["search"]) == (2, 9.5, 0.25)
    assert (timing["queue"], timing["load"], timing["prefill"]) == (1, 2, 3)
    assert timing["recompute"] == 1.5
    assert 0 < timing["retrieve"] <= timing["first_token"] <= timing["total"]
    assert gateway.records.asked == [answer["id"]]


async def test_the_plan_matches_the_prompt_that_is_sent(gateway: World) -> None:
    before_ms = time.time_ns() // 1_000_000
    await gateway.ask()
    sent = gateway.engine.requests[0]
    plan = plan_of(sent)
    space = load_model_folder(gateway.config.model).space("auto")
    # Head, two chunks of billing.md in document order, one of search.md.
    assert len(checked_segments(plan, sent["prompt"], space)) == len(plan.segments) == 4
    assert plan.domain == "public"
    # KV of a document deleted after that must not be stored again.
    assert before_ms <= plan.planned_at_ms <= time.time_ns() // 1_000_000
    documents = [segment.document for segment in plan.segments]
    assert documents == ["", *["default/billing.md"] * 2, "default/search.md"]
    assert "cache_salt" not in sent


async def test_plans_are_signed_with_the_first_key_of_a_file_that_may_change(
    tiny_model: Path, tmp_path: Path
) -> None:
    one, two, path = bytes([1] * 32), bytes([2] * 32), tmp_path / "keys"
    path.write_text(f"{one.hex()}\n{two.hex()}\n")
    now_s = 0.0
    async with world(tiny_model, signing_key_file=SigningKeys(path, lambda: now_s)) as gateway:
        for reuse in ("exact", "blend", "off"):
            await gateway.ask(ragcache={"reuse": reuse})
            assert is_signed_with(one, gateway.engine.requests[-1])
        path.write_text(f"{two.hex()}\n")
        now_s += CHECK_EVERY_S
        await gateway.ask()
        assert is_signed_with(two, gateway.engine.requests[-1])
        assert not is_signed_with(one, gateway.engine.requests[-1])


def is_signed_with(key: bytes, sent: dict[str, Any]) -> bool:
    params = sent["kv_transfer_params"]
    signature = params["ragcache_signature"]
    until_s = signed_until_s(params["ragcache"], sent["prompt"], signature, [key])
    return until_s is not None and is_timely(until_s, time.time())


async def test_reuse_off_computes_everything_and_shares_nothing(gateway: World) -> None:
    for _ in range(2):
        await gateway.ask(ragcache={"reuse": "off"})
    one, two = gateway.engine.requests
    plan = plan_of(one)
    assert {segment.action for segment in plan.segments} == {Action.COMPUTE}
    assert one["cache_salt"] != two["cache_salt"]


async def test_blend_reuses_chunks_after_any_prefix_and_the_head_only_exactly(
    gateway: World,
) -> None:
    response = await gateway.ask(ragcache={"reuse": "blend", "max_recompute_share": 0.5})
    assert response.status_code == 200
    plan = plan_of(gateway.engine.requests[-1])
    head, *chunks = plan.segments
    assert head.action is Action.EXACT
    assert [segment.action for segment in chunks] == [Action.BLEND] * 3
    assert [segment.document for segment in chunks][-1] == "default/search.md"
    assert plan.recompute_share == 0.5
    assert plan.planned_at_ms > 0
    assert "cache_salt" not in gateway.engine.requests[-1]
    # A request without a share gets the platform's.
    await gateway.ask(ragcache={"reuse": "blend"})
    assert (
        plan_of(gateway.engine.requests[-1]).recompute_share == gateway.config.max_recompute_share
    )


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_begins_with_citations_and_ends_with_costs(
    gateway: World, include_usage: bool
) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if include_usage else {}
    response = await gateway.ask(stream=True, **options)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = data_of(response.text)
    assert done == "[DONE]"
    for value in chunks:
        ChatCompletionChunk.model_validate(value)
    assert len({value["id"] for value in chunks}) == 1
    first, last = chunks[0], chunks[-1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["document_id"] for c in first["ragcache"]["citations"]] == ["billing.md", "search.md"]
    assert last["ragcache"]["cache"] == CACHE
    assert last["ragcache"]["timing_ms"]["stages"] == 2
    deltas = [value["choices"][0]["delta"] for value in chunks if value["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "It runs in eu-north."
    reasons = [v["choices"][0]["finish_reason"] for v in chunks if v["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"]
    if include_usage:
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 3
    else:
        assert last["choices"][0]["finish_reason"] == "stop"
        assert all("usage" not in value for value in chunks)


async def test_without_a_record_the_engines_share_is_null(gateway: World) -> None:
    gateway.records.has_no_records = True
    answer = (await gateway.ask()).json()["ragcache"]
    assert set(answer["cache"].values()) == {None}
    assert answer["timing_ms"]["prefill"] is None
    await gateway.servers["engine_records"].stop()
    assert (await gateway.ask()).status_code == 200


async def test_an_answer_without_usage_is_complete(gateway: World) -> None:
    gateway.engine.sends_usage = False
    answer = (await gateway.ask()).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] is None


async def test_history_comes_after_the_documents(gateway: World) -> None:
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "user", "content": "Where does billing run?"},
    ]
    response = await gateway.client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200
    await gateway.ask()
    long, short = (request["prompt"] for request in gateway.engine.requests)
    plan = plan_of(gateway.engine.requests[1])
    assert long[: plan.segments[-1].end] == short[: plan.segments[-1].end]
    assert gateway.retriever.searches[0].query == "Where does billing run?"


async def test_no_hits_still_give_an_answer(gateway: World) -> None:
    gateway.retriever.hits = []
    answer = (await gateway.ask()).json()
    assert answer["ragcache"]["citations"] == []
    assert answer["choices"][0]["message"]["content"]


async def test_a_budget_too_small_for_one_chunk_is_a_clear_error(gateway: World) -> None:
    gateway.retriever.hits = [retriever_pb2.Hit(chunk=chunk("big", 0, "word " * 3000), score=1.0)]
    response = await gateway.ask()
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
    assert "make the chunks smaller" in response.json()["error"]["message"]


async def test_unknown_names_are_404(gateway: World) -> None:
    for change, code in (
        ({"model": "other"}, "model_not_found"),
        ({"ragcache": {"collection": "nowhere"}}, "collection_not_found"),
    ):
        response = await gateway.ask(**change)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == code


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["refuse", "fail_after", "drop_after"])
async def test_an_engine_that_fails_before_the_first_token_is_503(
    gateway: World, stream: bool, way: str
) -> None:
    setattr(gateway.engine, way, (500, {"error": {"message": "x"}}) if way == "refuse" else 0)
    response = await gateway.ask(stream=stream)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("way", ["fail_after", "drop_after"])
async def test_an_engine_that_fails_during_a_stream_ends_it_with_an_error(
    gateway: World, way: str
) -> None:
    setattr(gateway.engine, way, 2)
    response = await gateway.ask(stream=True)
    assert response.status_code == 200
    *_, word, last = data_of(response.text)
    assert word["choices"][0]["delta"] == {"content": "eu-north"}
    assert last["error"]["code"] == "engine_unavailable"
    assert (await gateway.ask()).status_code == 503, (
        "an incomplete answer is not returned as complete"
    )


@pytest.mark.parametrize(
    "question",
    [
        {"stream": True},
        # Nothing shows the progress of an answer in one piece. Each token adds to its deadline.
        {"max_tokens": 1},
    ],
)
async def test_an_engine_that_is_silent_before_the_first_token_times_out(
    tiny_model: Path, question: dict[str, Any]
) -> None:
    async with world(tiny_model, first_token_timeout_s=0.2, next_token_timeout_s=0.2) as gateway:
        gateway.engine.hold_after = 0
        while not gateway.engine.aborted.is_set():  # a question may not reach the engine in time
            assert (await gateway.ask(**question)).status_code == 503


async def test_an_engine_that_is_silent_after_the_first_token_times_out(tiny_model: Path) -> None:
    async with world(tiny_model, next_token_timeout_s=0.2) as gateway:
        gateway.engine.hold_after = 1
        *_, last = data_of((await gateway.ask(stream=True)).text)
        assert last["error"]["code"] == "engine_unavailable"


async def test_a_dead_engine_is_503_and_recovery_needs_no_restart(tiny_model: Path) -> None:
    engine = FakeEngine()
    async with serving(engine) as port:
        pass
    async with world(tiny_model) as gateway:
        gateway.config = gateway.config.replace(engines=(gateway.engine_name(port),))
        async with (
            serving(gateway.app()) as lonely,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{lonely}", trust_env=False, timeout=60
            ) as client,
        ):
            body = {"messages": [{"role": "user", "content": "Where?"}]}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 503
            assert "Retry-After" in response.headers
            async with serving(engine, port):
                response = await client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1])
async def test_a_disconnecting_client_aborts_the_engines_request(
    gateway: World, stream: bool, after: int
) -> None:
    gateway.engine.hold_after = after
    asking = asyncio.create_task(gateway.ask(stream=stream))
    await asyncio.wait_for(gateway.engine.waiting.wait(), 60)
    asking.cancel()
    await asyncio.wait_for(gateway.engine.aborted.wait(), 60)
    await gateway.until_metric('requests_in_flight{pool="question"}', 0)


async def test_a_disconnecting_client_cancels_the_search(gateway: World) -> None:
    gateway.retriever.hold = asyncio.Event()
    asking = asyncio.create_task(gateway.ask())
    await asyncio.wait_for(gateway.retriever.waiting.wait(), 60)
    asking.cancel()
    await asyncio.wait_for(gateway.retriever.cancelled.wait(), 60)
    assert gateway.engine.requests == []
    await gateway.until_metric('requests_in_flight{pool="question"}', 0)


async def test_an_answer_can_be_explained_in_the_response_and_afterwards(gateway: World) -> None:
    gateway.records.segments = [engine_pb2.SegmentRecord(start=0, end=1, reason="evicted")]
    asked = await gateway.ask(ragcache={"explain": True})
    answer = asked.json()
    explanation = answer["ragcache"]["explanation"]
    assert [part["chunk"] for part in explanation["parts"] if part["chunk"]] == [
        "billing.md#0",
        "billing.md#1",
        "search.md#0",
    ]
    assert (
        explanation["engine"]
        == gateway.config.engines[0].host + f":{gateway.config.engines[0].http_port}"
    )
    later = await gateway.client.get(f"/v1/requests/{answer['id']}")
    assert (later.status_code, later.json()) == (200, explanation)
    plain = await gateway.ask()
    assert plain.json()["ragcache"]["explanation"] is None
    *_, last, _done = data_of((await gateway.ask(stream=True, ragcache={"explain": True})).text)
    assert last["ragcache"]["explanation"]["reuse"] == "exact"


async def test_an_unknown_request_cannot_be_explained(gateway: World) -> None:
    response = await gateway.client.get("/v1/requests/chatcmpl-none")
    assert response.status_code == 404
    assert "ragcache.explain" in response.json()["error"]["message"]
