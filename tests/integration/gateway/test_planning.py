"""The order of documents in prompts follows what engines have, where a request or a spec asks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from ragcache_wire.v1 import retriever_pb2
from tests.kit.gateway import World, bearer, chunk, until_predicted, world, write_keys

NAMES = ("one.md", "two.md", "three.md")


@pytest.fixture
async def gateway(tiny_model: Path) -> AsyncGenerator[World, None]:
    async with world(tiny_model) as running:
        await until_predicted(running.client)
        yield running


def hits(*names: str) -> list[retriever_pb2.Hit]:
    return [
        retriever_pb2.Hit(chunk=chunk(name, 0), score=1.0 - rank / 10)
        for rank, name in enumerate(names)
    ]


async def ask(gateway: World, *names: str, **options: Any) -> dict[str, Any]:
    gateway.retriever.hits = hits(*names)
    response = await gateway.ask(ragcache={"top_k": 3, **options})
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    return answer


def prompt_order(gateway: World) -> list[str]:
    """Return the documents of the latest prompt, in its order."""
    prompt = gateway.engine.requests[-1]["prompt"]
    prompts = gateway.prompts()

    def position(name: str) -> int:
        ids = list(prompts.encode_chunk(chunk(name, 0).text))
        return next(i for i in range(len(prompt)) if prompt[i : i + len(ids)] == ids)

    return sorted(NAMES, key=position)


async def test_a_prompt_begins_with_the_documents_of_an_earlier_one(gateway: World) -> None:
    await ask(gateway, "two.md", "three.md", "one.md")
    answer = await ask(gateway, "one.md", "two.md", "three.md", order="cached")
    assert prompt_order(gateway) == ["two.md", "three.md", "one.md"]
    # Citations are best first all the same.
    cited = [one["document_id"] for one in answer["ragcache"]["citations"]]
    assert cited == ["one.md", "two.md", "three.md"]


async def test_ranks_decide_by_default_and_after_reuse_off(gateway: World) -> None:
    await ask(gateway, "two.md", "three.md", "one.md", reuse="off")
    await ask(gateway, "one.md", "two.md", "three.md", order="cached")
    assert prompt_order(gateway) == list(NAMES)
    await ask(gateway, "three.md", "two.md", "one.md")
    assert prompt_order(gateway) == ["three.md", "two.md", "one.md"]


async def test_what_one_tenant_has_asked_is_not_predicted_for_another(
    tiny_model: Path, tmp_path: Path
) -> None:
    tenants = {name: f'scopes = ["admin"]\ntenant = "{name}"' for name in ("red", "blue")}
    file = write_keys(tmp_path / "keys.toml", tenants)
    async with world(tiny_model, api_keys_file=file) as gateway:
        gateway.client.headers.update(bearer("red"))
        await until_predicted(gateway.client)
        await ask(gateway, "two.md", "three.md", "one.md")
        # The engine would find none of this prompt for the other tenant.
        gateway.client.headers.update(bearer("blue"))
        await ask(gateway, *NAMES, order="cached")
        assert prompt_order(gateway) == list(NAMES)
        gateway.client.headers.update(bearer("red"))
        await ask(gateway, *NAMES, order="cached")
        assert prompt_order(gateway) == ["two.md", "three.md", "one.md"]
