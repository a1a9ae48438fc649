"""Chunks are computed ahead of questions, and never while a question is answered."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.background.precompute_queue import PrecomputeQueue
from ragcache_core.identity.keys import PUBLIC_DOMAIN, chunk_key
from ragcache_core.plan.reuse_plan import Action, ReusePlan, document_name
from ragcache_core.plan.segments import checked_segments
from ragcache_core.plan.signature import signed_until_s
from ragcache_core.scheduling.priority import BACKGROUND_BAND
from ragcache_gateway.background import chunk_ranking, precompute, slice_costs
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.settings.gateway import EngineAddress
from ragcache_wire.v1 import cachestore_pb2
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.kit.gateway import FakeEngine, World, band_of, serving, until_ready, world
from tests.kit.wait import until


@pytest.fixture(autouse=True)
def no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute a document at once, without a wait for others."""
    monkeypatch.setattr(precompute, "LINGER_S", 0.0)


@pytest.fixture
async def gateway(tiny_model: Path) -> AsyncGenerator[World, None]:
    async with world(tiny_model, precompute=True, reuse="blend") as running:
        yield running


async def put(gateway: World, name: str, text: str = "") -> None:
    body = {"id": name, "text": text or f"Text of {name}."}
    assert (await gateway.client.post("/v1/documents", json=body)).status_code == 200


async def counted(gateway: World, name: str) -> dict[str, float]:
    text = (await gateway.client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith(f"ragcache_gateway_{name}")]
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    return {name: value for name, value in values.items() if value}


COMPUTED = {
    "prompt_tokens": 800,
    "local_tokens": 0,
    "loaded_tokens": 0,
    "prefill_s": 0.5,
    "recomputed_tokens": 0,
    "recompute_s": 0.0,
}
"""The engine's record of a question without any cached chunk."""

RECOMPUTED = {
    "prompt_tokens": 800,
    "loaded_tokens": 790,
    "recomputed_tokens": 100,
    "recompute_s": 0.2,
}
"""The engine's record of a question blended from other prompts' KV."""


def plan_of(body: dict[str, Any]) -> ReusePlan:
    return ReusePlan.decode(body["kv_transfer_params"]["ragcache"])


def precomputed(gateway: World) -> list[dict[str, Any]]:
    return [body for body in gateway.engine.requests if band_of(body) == BACKGROUND_BAND]


def plan_contains(bodies: list[dict[str, Any]], ids: list[int]) -> bool:
    """Whether a plan has a chunk of these tokens."""
    return any(
        body["prompt"][segment.start : segment.end] == ids
        for body in bodies
        for segment in plan_of(body).segments
    )


def stored_variant(
    chunk: bytes, prefix: bytes, num_tokens: int, position: int
) -> cachestore_pb2.StoredVariant:
    one = cachestore_pb2.StoredVariant(tier="memory")
    one.key.chunk, one.key.prefix = chunk, prefix
    one.info.num_tokens, one.info.base_position = num_tokens, position
    one.info.num_bytes, one.info.exact = 1, True
    return one


def chunk_names(gateway: World, body: dict[str, Any], texts: dict[str, str]) -> list[str]:
    """Return the names of a prompt's chunks, by their texts."""
    ids = {name: gateway.prompts().encode_chunk(text) for name, text in texts.items()}
    found = []
    for segment in plan_of(body).segments[1:]:
        tokens = body["prompt"][segment.start : segment.end]
        found += [name for name, one in ids.items() if one == tokens]
    return found


async def written_together(gateway: World, texts: dict[str, str]) -> None:
    """Write documents while a question is answered, so that all wait in the queue."""
    gateway.engine.pause = asyncio.Event()
    asked = asyncio.create_task(gateway.ask())
    await gateway.engine.waiting.wait()
    for name, text in texts.items():
        await put(gateway, name, text)
    gateway.engine.pause.set()
    await asked


async def test_only_engines_that_run_ragcache_compute_ahead(tiny_model: Path) -> None:
    theirs = FakeEngine()
    async with serving(theirs) as port:
        engines = (EngineAddress("127.0.0.1", port),)
        async with world(tiny_model, precompute=True, reuse="blend", engines=engines) as gateway:
            await until_ready(gateway.client, 2)
            for number in range(4):  # engines take turns
                await put(gateway, f"{number}.md")
                await until(lambda: len(precomputed(gateway)) > number)  # noqa: B023
            assert theirs.requests == []


async def test_chunks_are_computed_in_sequences_and_the_first_ones_again_at_the_end(
    gateway: World,
) -> None:
    texts = {name: f"Text of {name}. " * 12 for name in ("a.md", "b.md", "c.md", "d.md")}
    before_ms = time.time_ns() // 1_000_000
    await written_together(gateway, texts)
    await until(lambda: len(precomputed(gateway)) > 0)
    await until_computed(gateway, 4)
    last = precomputed(gateway)[-1]
    names = chunk_names(gateway, last, texts)
    assert names[:4] == list(texts)
    assert names[4:] == names[: len(names) - 4]
    assert len(names) > 4
    plan = plan_of(last)
    assert {segment.action for segment in plan.segments[1:]} == {Action.EXACT}
    # A delete finds each chunk by document, and an earlier delete is not undone.
    assert [s.document for s in plan.segments[1:]] == [
        document_name("default", name) for name in names
    ]
    assert before_ms <= plan.planned_at_ms <= time.time_ns() // 1_000_000
    assert plan.domain == PUBLIC_DOMAIN
    assert last["max_tokens"] == 1
    # The prompt ends with the last chunk.
    assert len(last["prompt"]) == plan.segments[-1].end


async def until_computed(gateway: World, count: int, outcome: str = "computed") -> None:
    async def are_computed() -> bool:
        outcomes = await counted(gateway, "precomputed_chunks_total")
        return sum(value for name, value in outcomes.items() if f'"{outcome}"' in name) == count

    await until(are_computed, f"{count} chunks {outcome}")


async def test_later_sequences_begin_with_the_context_of_the_first_one(gateway: World) -> None:
    texts = {name: f"Text of {name}. " * 12 for name in ("a.md", "b.md", "c.md")}
    await written_together(gateway, texts)
    await until_computed(gateway, 3)
    context = chunk_names(gateway, precomputed(gateway)[-1], texts)[3:]
    before = len(precomputed(gateway))
    await put(gateway, "d.md", "Another text.")
    await until_computed(gateway, 4)
    [body] = precomputed(gateway)[before:]
    assert chunk_names(gateway, body, texts | {"d.md": "Another text."}) == [*context, "d.md"]


async def test_a_deleted_document_is_context_no_more(gateway: World) -> None:
    texts = {name: f"Text of {name}. " * 12 for name in ("a.md", "b.md", "c.md")}
    await written_together(gateway, texts)
    await until_computed(gateway, 3)
    await gateway.client.delete("/v1/documents/a.md")
    before = len(precomputed(gateway))
    await put(gateway, "d.md", "Another text.")
    await until_computed(gateway, 4)
    names = chunk_names(gateway, precomputed(gateway)[before], texts | {"d.md": "Another text."})
    assert "a.md" not in names
    assert names[-1] == "d.md"
    assert len(names) > 1


async def test_a_single_chunk_is_computed_after_the_last_ones(gateway: World) -> None:
    texts = {name: f"Text of {name}." for name in ("a.md", "b.md")}
    for number, name in enumerate(texts, start=1):
        await put(gateway, name)
        await until_computed(gateway, number)
    assert [chunk_names(gateway, body, texts) for body in precomputed(gateway)] == [
        ["a.md"],
        ["a.md", "b.md"],
    ]


async def test_central_chunks_come_first(gateway: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_ranking, "SETTLE_S", 0.0)
    rank_document, ranked = PrecomputeQueue.rank_document, []

    def rank(queue: PrecomputeQueue, document: str, centralities: Sequence[float]) -> None:
        rank_document(queue, document, centralities)
        ranked.append(document)

    monkeypatch.setattr(PrecomputeQueue, "rank_document", rank)
    gateway.retriever.similar = {"b.md": [0.9] * 8, "a.md": [0.1] * 8}
    gateway.engine.pause = asyncio.Event()
    asked = asyncio.create_task(gateway.ask())
    await gateway.engine.waiting.wait()
    for name in ("a.md", "b.md"):
        await put(gateway, name)
    await until(lambda: len(ranked) == 2)
    gateway.engine.pause.set()
    await asked
    await until_computed(gateway, 2)
    texts = {name: f"Text of {name}." for name in ("a.md", "b.md")}
    assert chunk_names(gateway, precomputed(gateway)[0], texts)[:2] == ["b.md", "a.md"]


async def test_plans_of_background_requests_are_signed(tiny_model: Path, tmp_path: Path) -> None:
    key, path = bytes([1] * 32), tmp_path / "keys"
    path.write_text(key.hex())
    keys = SigningKeys(path)
    async with world(tiny_model, precompute=True, reuse="blend", signing_key_file=keys) as gateway:
        await put(gateway, "a.md")
        await until(lambda: len(gateway.engine.requests) == 1)
        [body] = gateway.engine.requests
    params = body["kv_transfer_params"]
    signature = params["ragcache_signature"]
    assert signed_until_s(params["ragcache"], body["prompt"], signature, [key]) is not None


async def test_a_prefill_has_the_same_template_segment_as_questions(gateway: World) -> None:
    await put(gateway, "a.md")
    await until(lambda: len(gateway.engine.requests) == 1)
    await gateway.ask()
    first, second = map(plan_of, gateway.engine.requests)
    assert first.segments[0] == second.segments[0]


async def test_an_unchanged_document_is_not_computed_again(gateway: World) -> None:
    await put(gateway, "a.md")
    await put(gateway, "a.md")
    await put(gateway, "b.md")
    await until(lambda: len(gateway.engine.requests) == 2)
    await asyncio.sleep(0.1)
    assert len(gateway.engine.requests) == 2


async def test_prefills_wait_while_a_question_is_answered(gateway: World) -> None:
    gateway.engine.pause = asyncio.Event()
    asked = asyncio.create_task(gateway.ask())
    await gateway.engine.waiting.wait()
    await put(gateway, "a.md")
    await asyncio.sleep(0.2)
    assert len(gateway.engine.requests) == 1
    waiting = await counted(gateway, "precompute_waiting_chunks")
    assert set(waiting.values()) == {1.0}
    gateway.engine.pause.set()
    assert (await asked).status_code == 200
    await until(lambda: len(gateway.engine.requests) == 2)


async def test_a_chunk_that_the_engine_refuses_does_not_block_the_next(tiny_model: Path) -> None:
    # No health check runs meanwhile, which the engine would refuse, too.
    settings: dict[str, Any] = {"precompute": True, "reuse": "blend", "engine_watch_s": 60}
    async with world(tiny_model, **settings) as gateway:
        await until(lambda: gateway.engine.probes == 1)
        gateway.engine.refuse = (400, {"error": {"message": "too long"}})
        await put(gateway, "a.md")
        await until_computed(gateway, 1, "refused")
        gateway.engine.refuse = None
        await put(gateway, "b.md")
        await until(lambda: len(gateway.engine.requests) == 1)


async def test_an_unavailable_engine_is_tried_again(
    gateway: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "RETRY_S", 0.05)
    gateway.engine.refuse = (500, {"error": {"message": "it is starting"}})
    await put(gateway, "a.md")
    await asyncio.sleep(0.2)
    gateway.engine.refuse = None
    await until(lambda: len(gateway.engine.requests) == 1)


async def test_a_chunk_that_does_not_fit_the_queue_is_dropped(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "MAX_WAITING_BYTES", 1100)
    async with world(tiny_model, precompute=True, reuse="blend") as gateway:
        gateway.engine.pause = asyncio.Event()
        asked = asyncio.create_task(gateway.ask())
        await gateway.engine.waiting.wait()
        for name in ("a.md", "b.md", "c.md"):
            await put(gateway, name)  # 1,037 bytes each
        gateway.engine.pause.set()
        await asked
        await until(lambda: len(gateway.engine.requests) == 2)
        await asyncio.sleep(0.1)
        assert len(gateway.engine.requests) == 2
        found = await counted(gateway, "precomputed_chunks_total")
        assert [value for name, value in found.items() if "dropped" in name] == [2.0]


async def test_nothing_is_precomputed_unless_it_is_switched_on(tiny_model: Path) -> None:
    async with world(tiny_model, reuse="blend") as gateway:
        await put(gateway, "a.md")
        gateway.records.fields = COMPUTED
        for _ in range(3):
            await gateway.ask()
        await asyncio.sleep(0.2)
        assert precomputed(gateway) == []


async def test_chunks_that_questions_missed_twice_are_computed(gateway: World) -> None:
    gateway.records.fields = COMPUTED
    await gateway.ask()
    await asyncio.sleep(0.2)
    assert precomputed(gateway) == []
    await gateway.ask()
    await until_computed(gateway, 3)
    asked = plan_of(gateway.engine.requests[0])
    last = plan_of(precomputed(gateway)[-1])
    assert {s.chunk for s in last.segments} == {s.chunk for s in asked.segments}
    sources = await counted(gateway, "precomputed_chunks_total")
    assert [name for name in sources if 'outcome="computed",source="asked"' in name]


async def test_passages_of_a_client_are_not_computed_ahead(gateway: World) -> None:
    """What is computed ahead serves every key, and another key's text may not be in it."""
    gateway.records.fields = COMPUTED
    for _ in range(3):
        await gateway.ask(ragcache={"passages": [{"text": "Answer that it runs in the north."}]})
    await gateway.ask()
    await gateway.ask()
    await until_computed(gateway, 3)
    own = plan_of(gateway.engine.requests[3]).segments
    computed = {s.chunk for body in precomputed(gateway) for s in plan_of(body).segments}
    assert computed == {s.chunk for s in own}


async def test_a_missing_chunk_that_questions_met_twice_is_computed(gateway: World) -> None:
    gateway.records.fields = {
        "prompt_tokens": 800,
        "local_tokens": 0,
        "loaded_tokens": 790,
        "recomputed_tokens": 50,
        "recompute_s": 0.1,
        "missing_chunks": [2],
    }
    await gateway.ask()
    await asyncio.sleep(0.2)
    assert precomputed(gateway) == []
    await gateway.ask()
    await until(lambda: len(precomputed(gateway)) == 2)
    await asyncio.sleep(0.2)
    missing, context = map(plan_of, precomputed(gateway))
    asked = plan_of(gateway.engine.requests[0])
    assert missing.segments[1].chunk == asked.segments[2].chunk
    assert [s.chunk for s in context.segments] == [s.chunk for s in asked.segments]


async def test_chunks_that_questions_found_are_not_computed(gateway: World) -> None:
    gateway.records.fields = {"prompt_tokens": 800, "loaded_tokens": 790, "recompute_s": 0.0}
    for _ in range(3):
        await gateway.ask()
    await asyncio.sleep(0.2)
    assert precomputed(gateway) == []


async def test_a_context_that_was_recomputed_twice_is_computed_in_its_order(gateway: World) -> None:
    gateway.records.fields = RECOMPUTED
    await gateway.ask()
    await asyncio.sleep(0.2)
    assert precomputed(gateway) == []
    await gateway.ask()
    await until(lambda: len(precomputed(gateway)) == 1)
    [body] = precomputed(gateway)
    question = gateway.engine.requests[0]
    asked = plan_of(question).segments
    assert body["prompt"][: asked[-1].end] == question["prompt"][: asked[-1].end]
    computed = plan_of(body).segments
    assert {segment.action for segment in computed} == {Action.EXACT}
    assert [(s.chunk, s.document) for s in computed] == [(s.chunk, s.document) for s in asked]
    assert len({segment.document for segment in computed}) == 3  # the template has none


async def test_a_context_is_dropped_with_any_of_its_documents(gateway: World) -> None:
    await put(gateway, "search.md")
    await until(lambda: len(precomputed(gateway)) == 1)
    gateway.records.fields = RECOMPUTED
    await gateway.ask()
    gateway.engine.pause = asyncio.Event()
    # While the first one is answered nothing is computed; its end makes the context due.
    asked = [asyncio.create_task(gateway.ask()) for _ in range(2)]
    await until(lambda: len(gateway.engine.requests) == 4)
    documents = {segment.document for segment in plan_of(gateway.engine.requests[-1]).segments}
    assert document_name("default", "search.md") in documents
    assert (await gateway.client.delete("/v1/documents/search.md")).status_code == 200
    gateway.engine.pause.set()
    await asyncio.gather(*asked)
    await asyncio.sleep(0.2)
    assert len(precomputed(gateway)) == 1


async def test_a_chunk_that_the_store_has_meanwhile_is_skipped(gateway: World) -> None:
    gateway.records.fields = COMPUTED
    await gateway.ask()
    _, first, *_ = plan_of(gateway.engine.requests[0]).segments
    gateway.store.stored[first.chunk] = [
        stored_variant(first.chunk, bytes(16), first.end - first.start, 500)
    ]
    await gateway.ask()
    await until_computed(gateway, 2)
    assert first.chunk not in {s.chunk for b in precomputed(gateway) for s in plan_of(b).segments}
    outcomes = await counted(gateway, "precomputed_chunks_total")
    assert [value for name, value in outcomes.items() if "stored" in name] == [1.0]


async def test_an_unavailable_store_is_tried_again(
    gateway: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "RETRY_S", 0.05)
    gateway.store.unavailable = True
    await put(gateway, "a.md")
    await asyncio.sleep(0.3)
    assert gateway.engine.requests == []
    gateway.store.unavailable = False
    await until(lambda: len(gateway.engine.requests) == 1)


async def test_an_unavailable_shard_does_not_block_chunks_of_another(gateway: World) -> None:
    space = load_model_folder(gateway.config.model).space("auto")

    def key(name: str) -> bytes:
        return chunk_key(space, PUBLIC_DOMAIN, gateway.prompts().encode_chunk(f"Text of {name}."))

    gateway.store.unavailable_chunks = {key("a.md")}
    await put(gateway, "a.md")
    await asyncio.sleep(0.1)
    await put(gateway, "b.md")
    await until(lambda: len(precomputed(gateway)) == 1)
    assert plan_of(precomputed(gateway)[0]).segments[1].chunk == key("b.md")
    gateway.store.unavailable_chunks = set()
    await until(lambda: len(precomputed(gateway)) == 2)
    assert plan_of(precomputed(gateway)[1]).segments[-1].chunk == key("a.md")


async def test_a_chunk_that_makes_engines_fail_is_abandoned(tiny_model: Path) -> None:
    # The next health check comes soon and succeeds.
    settings: dict[str, Any] = {"precompute": True, "reuse": "blend", "engine_watch_s": 0.05}
    async with world(tiny_model, **settings) as gateway:
        await until(lambda: gateway.engine.probes > 0)
        gateway.engine.drop_after = 0
        await put(gateway, "a.md")
        await until_computed(gateway, 1, "failed")
        assert len(gateway.engine.requests) == 2
        gateway.engine.drop_after = None
        await put(gateway, "b.md")
        await until(lambda: len(gateway.engine.requests) == 3)


async def test_an_abandoned_chunk_gets_as_many_attempts_the_next_time(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "RETRY_S", 0.02)
    async with world(tiny_model, precompute=True, reuse="blend") as gateway:
        await until(lambda: gateway.engine.probes > 0)
        space = load_model_folder(gateway.config.model).space("auto")
        waiting = gateway.prompts().encode_chunk("Text of waiting.md.")
        gateway.store.unavailable_chunks = {chunk_key(space, PUBLIC_DOMAIN, waiting)}
        await put(gateway, "waiting.md")
        gateway.engine.drop_after = 0
        for times, name in enumerate(("a.md", "b.md"), start=1):
            await put(gateway, name, "A text that both have.")
            await until_computed(gateway, times, "failed")
            assert len(gateway.engine.requests) == times * precompute.MAX_LOST_ENGINES


async def test_a_chunk_deleted_before_its_turn_is_not_computed(gateway: World) -> None:
    gateway.engine.pause = asyncio.Event()
    asked = asyncio.create_task(gateway.ask())
    await gateway.engine.waiting.wait()
    for name in ("a.md", "b.md", "c.md"):
        await put(gateway, name)
    await gateway.client.delete("/v1/documents/a.md")
    await put(gateway, "b.md", "Another text.")
    gateway.engine.pause.set()
    await asked
    await until_computed(gateway, 2)
    texts = {
        "a.md": "Text of a.md.",
        "b.md": "Text of b.md.",
        "c.md": "Text of c.md.",
        "new": "Another text.",
    }
    assert set(chunk_names(gateway, precomputed(gateway)[-1], texts)) == {"c.md", "new"}


async def test_under_exact_the_first_document_is_computed(tiny_model: Path) -> None:
    async with world(tiny_model, precompute=True) as gateway:
        await put(gateway, "a.md")
        gateway.records.fields = COMPUTED
        for _ in range(2):
            await gateway.ask()
        await until(lambda: len(precomputed(gateway)) == 1)
        await asyncio.sleep(0.2)
        [body] = precomputed(gateway)
        asked = plan_of(gateway.engine.requests[0])
        # The template and the two chunks of billing.md, and not the one of search.md.
        assert plan_of(body).segments == asked.segments[:3]
        assert (
            body["prompt"][: asked.segments[2].end]
            == (gateway.engine.requests[0]["prompt"][: asked.segments[2].end])
        )

        gateway.store.stored = {
            named.segment.chunk: [
                stored_variant(
                    named.segment.chunk,
                    named.variant.prefix,
                    named.segment.end - named.segment.start,
                    named.segment.start,
                )
            ]
            for named in checked_segments(
                asked,
                gateway.engine.requests[0]["prompt"],
                load_model_folder(gateway.config.model).space("auto"),
            )
        }
        for _ in range(3):  # a chunk that was computed once needs more misses
            await gateway.ask()

        async def is_stored() -> bool:
            outcomes = await counted(gateway, "precomputed_chunks_total")
            return any("stored" in name for name in outcomes)

        await until(is_stored)
        assert len(precomputed(gateway)) == 1


async def test_under_exact_nothing_is_computed_after_a_clients_own_system_prompt(
    tiny_model: Path,
) -> None:
    async with world(tiny_model, precompute=True) as gateway:
        gateway.records.fields = COMPUTED
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Where does billing run?"},
        ]
        for _ in range(3):
            await gateway.client.post("/v1/chat/completions", json={"messages": messages})
        await asyncio.sleep(0.2)
        assert precomputed(gateway) == []


LONG = "A long text. " * 30


async def until_cut(gateway: World, most: int) -> None:
    """Wait for a long prefill, each request with at most this many tokens more than the last."""
    ids = gateway.prompts().encode_chunk(LONG)
    await until(lambda: plan_contains(gateway.engine.requests, ids))
    bodies = precomputed(gateway)
    whole = bodies[-1]["prompt"]
    lengths = [len(body["prompt"]) for body in bodies]
    assert [body["prompt"] for body in bodies] == [whole[:length] for length in lengths]
    assert [b - a for a, b in itertools.pairwise(lengths[:-1])] == [most] * (len(lengths) - 2)
    assert lengths[-1] - lengths[-2] <= most
    # No segment is saved before it is complete.
    last = plan_of(bodies[-1])
    assert [plan_of(body).segments for body in bodies] == [
        tuple(segment for segment in last.segments if segment.end <= length) for length in lengths
    ]


async def test_a_long_prefill_is_cut_into_halves_of_a_step(gateway: World) -> None:
    gateway.records.pass_tokens = 40
    await put(gateway, "a.md", LONG)
    await until_cut(gateway, 20)


@pytest.mark.parametrize("unavailable", [False, True])
async def test_a_prefill_is_cut_small_if_the_engine_does_not_report_its_step(
    gateway: World, monkeypatch: pytest.MonkeyPatch, unavailable: bool
) -> None:
    monkeypatch.setattr(slice_costs, "UNKNOWN_STEP_TOKENS", 60)
    gateway.records.unavailable = unavailable
    await put(gateway, "a.md", LONG)
    await until_cut(gateway, 30)


@pytest.mark.parametrize(("num_kept", "num_requests"), [(0, 14), (16, 17)])
async def test_a_chunk_that_the_engine_evicts_between_requests_is_abandoned(
    gateway: World, num_kept: int, num_requests: int
) -> None:
    gateway.records.pass_tokens = 40

    def fields_of(request: str) -> dict[str, int]:
        """Make the record of an engine that evicts everything after so many requests."""
        requests = [plan_of(body).request for body in gateway.engine.requests]
        index = requests.index(request)
        length = len(gateway.engine.requests[index]["prompt"])
        local = length - 20 if index < num_kept else 0
        return {"prompt_tokens": length, "local_tokens": local, "loaded_tokens": 0}

    gateway.records.fields_of = fields_of
    gateway.engine.reports_cached = False
    await put(gateway, "a.md", LONG)
    [(labels, count)] = (await until(lambda: counted(gateway, "precomputed_chunks_total"))).items()
    assert ('outcome="evicted"' in labels, count) == (True, 1.0)
    # The request that took more than a step was the last.
    assert len(precomputed(gateway)) == num_requests
    # Other chunks are still computed.
    gateway.records.fields_of = lambda _: {}
    await put(gateway, "b.md")
    ids = gateway.prompts().encode_chunk("Text of b.md.")
    await until(lambda: plan_contains(gateway.engine.requests, ids))


async def test_a_question_is_answered_between_two_requests_of_a_prefill(gateway: World) -> None:
    gateway.records.pass_tokens = 40
    gateway.engine.pause = asyncio.Event()
    asked = asyncio.create_task(gateway.ask())
    await gateway.engine.waiting.wait()
    await put(gateway, "a.md", LONG)
    gateway.engine.waiting.clear()
    gateway.engine.pause.set()
    await asked
    paused = gateway.engine.pause = asyncio.Event()
    gateway.engine.waiting.clear()  # a request may have passed the other pause
    await gateway.engine.waiting.wait()  # in the first request that the engine pauses
    before = len(precomputed(gateway))
    question = gateway.engine.pause = asyncio.Event()
    again = asyncio.create_task(gateway.ask())
    await until(lambda: len(gateway.engine.requests) == before + 2)
    paused.set()
    await asyncio.sleep(0.3)
    assert len(precomputed(gateway)) == before
    gateway.engine.pause = None
    question.set()
    assert (await again).status_code == 200
    ids = gateway.prompts().encode_chunk(LONG)
    await until(lambda: plan_contains(gateway.engine.requests, ids))
    assert len(precomputed(gateway)) > before


async def test_a_prefill_stops_when_its_document_is_deleted(gateway: World) -> None:
    gateway.records.pass_tokens = 40
    paused = gateway.engine.pause = asyncio.Event()
    await put(gateway, "a.md", LONG)
    await gateway.engine.waiting.wait()
    assert (await gateway.client.delete("/v1/documents/a.md")).status_code == 200
    gateway.engine.pause = None
    paused.set()
    await asyncio.sleep(0.3)
    assert len(precomputed(gateway)) == 1
    await put(gateway, "b.md")
    ids = gateway.prompts().encode_chunk("Text of b.md.")
    await until(lambda: plan_contains(gateway.engine.requests, ids))
    assert not plan_contains(gateway.engine.requests, gateway.prompts().encode_chunk(LONG))


async def test_a_busy_engine_does_not_count_as_failed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "RETRY_S", 0.02)
    settings: dict[str, Any] = {"precompute": True, "reuse": "blend", "first_token_timeout_s": 1}
    async with world(tiny_model, **settings) as gateway:
        await until(lambda: gateway.engine.probes > 0)
        waiting = gateway.engine.prefill = asyncio.Event()
        await put(gateway, "a.md")
        await until(lambda: len(precomputed(gateway)) > precompute.MAX_LOST_ENGINES + 1)
        assert await counted(gateway, "precomputed_chunks_total") == {}
        gateway.engine.prefill = None
        waiting.set()
        outcomes = await until(lambda: counted(gateway, "precomputed_chunks_total"))
        assert ['outcome="computed"' in name for name in outcomes] == [True]


async def test_prefills_come_after_questions(gateway: World) -> None:
    await put(gateway, "a.md")
    await gateway.ask()
    await until(lambda: len(gateway.engine.requests) == 2)
    [prefill] = precomputed(gateway)
    [question] = [body for body in gateway.engine.requests if body is not prefill]
    assert prefill["priority"] > question["priority"]
    assert band_of(question) == 0
