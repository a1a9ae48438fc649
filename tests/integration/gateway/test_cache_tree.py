"""GET /v1/cache/tree: the hottest nodes of the knowledge tree."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.gateway import World, until_predicted, world


@pytest.fixture
async def gateway(tiny_model: Path) -> AsyncGenerator[World, None]:
    async with world(tiny_model) as running:
        await until_predicted(running.client)
        yield running


async def tree_of(gateway: World, **params: Any) -> dict[str, Any]:
    response = await gateway.client.get("/v1/cache/tree", params=params)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_a_new_gateway_has_an_empty_tree(gateway: World) -> None:
    assert await tree_of(gateway) == {"total": 0, "nodes": []}


async def test_the_chunks_of_a_question_are_named_with_tier_and_uses(gateway: World) -> None:
    assert (await gateway.ask()).status_code == 200
    found = await tree_of(gateway)
    nodes = found["nodes"]
    assert found["total"] == len(nodes)
    chunks = [one for one in nodes if one["kind"] == "chunk"]
    assert [one["chunk"] for one in chunks] == ["billing.md#0", "billing.md#1", "search.md#0"]
    assert chunks[0]["title"] == "Title of billing.md"
    engine = str(gateway.config.engines[0].host)
    for one in nodes:
        [copy] = one["copies"]
        assert copy["source"].startswith(f"engine:{engine}:")
        assert (copy["tier"], copy["exact"]) == ("device", True)
        assert one["tokens"] > 0
        assert one["uses"] > 0
    depths = [one["depth"] for one in nodes]
    assert depths == list(range(len(nodes)))


async def test_the_limit_keeps_the_beginning_of_the_prompt(gateway: World) -> None:
    await gateway.ask()
    [only] = (await tree_of(gateway, limit=1))["nodes"]
    assert (only["parent"], only["kind"]) == (None, "template")
    assert (only["children"], only["children_cut"]) == (1, 1)


async def test_the_document_of_the_api_describes_it(gateway: World) -> None:
    api = (await gateway.client.get("/openapi.json")).json()
    described = api["paths"]["/v1/cache/tree"]["get"]
    assert described["tags"] == ["status"]
    schema = described["responses"]["200"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/TreeOutline"}
    [limit] = described["parameters"]
    assert (limit["schema"]["minimum"], limit["schema"]["maximum"]) == (1, 500)
