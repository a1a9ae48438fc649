"""Chats with passages that the client has retrieved itself."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core.plan.reuse_plan import Action
from tests.kit.gateway import World, plan_of

BILLING = {"id": "docs/billing-guide.md", "text": "Billing runs in eu-north.", "score": 0.75}
SEARCH = {"title": "Search guide", "text": "Search runs in us-east."}


async def ask(gateway: World, *passages: dict[str, Any], **options: Any) -> Any:
    response = await gateway.ask(ragcache={"passages": [*passages], **options})
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_answer_comes_from_the_passages_and_nothing_is_searched(gateway: World) -> None:
    answer = await ask(gateway, BILLING, SEARCH)
    assert gateway.retriever.searches == []
    first, second = answer["ragcache"]["citations"]
    assert (first["document_id"], first["title"], first["score"]) == (
        "docs/billing-guide.md",
        "docs/billing-guide.md",
        0.75,
    )
    assert first["text_preview"] == BILLING["text"]
    assert (second["title"], second["score"], second["updated"]) == ("Search guide", 0.0, None)
    assert answer["ragcache"]["queries"] == answer["ragcache"]["warnings"] == []


async def test_a_passage_has_the_key_of_the_same_text_at_any_position(gateway: World) -> None:
    await ask(gateway, BILLING, SEARCH)
    await ask(gateway, SEARCH, BILLING)
    one, two = (plan_of(sent).segments for sent in gateway.engine.requests)
    assert one[0] == two[0], "the head is that of own documents"
    assert [segment.chunk for segment in one[1:]] == [two[2].chunk, two[1].chunk]
    assert {segment.action for segment in (*one, *two)} == {Action.EXACT}
    text = "[billing-guide]\nBilling runs in eu-north."
    ids = gateway.prompts().encode_chunk(text)
    sent = gateway.engine.requests[0]["prompt"]
    assert sent[one[1].start : one[1].end] == ids, "as an ingested chunk"


async def test_the_head_is_the_same_with_own_documents_and_without_passages(gateway: World) -> None:
    await gateway.ask()
    await ask(gateway)
    await ask(gateway, BILLING)
    heads = {plan_of(sent).segments[0] for sent in gateway.engine.requests}
    assert len(heads) == 1


async def test_passages_belong_to_no_document_and_to_their_key(gateway: World) -> None:
    await ask(gateway, BILLING, SEARCH)
    plan = plan_of(gateway.engine.requests[0])
    assert {segment.document for segment in plan.segments} == {""}
    assert (plan.own_head, plan.num_head) == (True, 3)


async def test_passages_of_one_id_stay_together_and_repeats_are_left_out(gateway: World) -> None:
    later = {"id": BILLING["id"], "text": "It moved there in 2024."}
    answer = await ask(gateway, BILLING, SEARCH, later, BILLING, explain=True)
    parts = answer["ragcache"]["explanation"]["parts"]
    found = [one["document_id"] for one in parts if one["chunk"]]
    assert found == [BILLING["id"], BILLING["id"], found[2]]
    assert len(answer["ragcache"]["citations"]) == 3


async def test_blends_and_other_orders_are_allowed(gateway: World) -> None:
    await ask(gateway, BILLING, SEARCH, reuse="blend", order="cached")
    plan = plan_of(gateway.engine.requests[0])
    assert [one.action for one in plan.segments] == [Action.EXACT, Action.BLEND, Action.BLEND]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"collection": "default"}, "ragcache.collection"),
        ({"top_k": 4}, "ragcache.top_k"),
        ({"retrieve": True}, "ragcache.retrieve"),
        ({"rewrite": "off"}, "ragcache.rewrite"),
        ({"max_searches": 2}, "ragcache.max_searches"),
        ({"passages": [{"text": ""}]}, "ragcache.passages[0].text"),
        ({"passages": [{"text": "a", "id": ""}]}, "ragcache.passages[0].id"),
        ({"passages": [{"text": "a", "page": 1}]}, "ragcache.passages[0].page"),
        ({"passages": [{"text": "a"}] * 257}, "ragcache.passages"),
        ({"passages": [{"text": "a\0"}]}, "ragcache.passages[0].text"),
    ],
)
async def test_wrong_passages_are_refused_by_field(
    gateway: World, options: dict[str, Any], field: str
) -> None:
    response = await gateway.ask(ragcache={"passages": [BILLING], **options})
    assert response.status_code in (400, 422)
    assert field in response.text
    assert gateway.engine.requests == []


async def test_a_completion_takes_no_passages(gateway: World) -> None:
    body = {"prompt": "Billing runs in", "ragcache": {"passages": [BILLING]}}
    response = await gateway.client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "ragcache.passages" in response.text


async def test_passages_that_do_not_fit_are_left_out_with_a_warning(gateway: World) -> None:
    long = {"text": "word " * 40_000}
    answer = await ask(gateway, BILLING, long)
    [warning] = answer["ragcache"]["warnings"]
    assert "1 of 2 left out" in warning
    assert len(answer["ragcache"]["citations"]) == 1


async def test_a_response_takes_passages(gateway: World) -> None:
    body = {"input": "Where does billing run?", "ragcache": {"passages": [BILLING]}}
    response = await gateway.client.post("/v1/responses", json=body)
    assert response.status_code == 200
    assert gateway.retriever.searches == []
    [citation] = response.json()["ragcache"]["citations"]
    assert citation["document_id"] == BILLING["id"]
