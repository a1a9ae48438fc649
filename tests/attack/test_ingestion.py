"""Documents that no machine embeds in time cost their own tenant alone.

Gateways and retriever are processes, and are killed. The retriever embeds with the bundled model.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from harness.processes import free_port
from tests.attack.attacked_gateway import AttackedGateway, attacked_gateway
from tests.integration.retriever.test_process import environment, running
from tests.kit.gateway import bearer
from tests.kit.wait import until

LIST = "\n- " * 500_000
"""Half a million items, each a chunk of its own for a tokenizer that has no longer tokens."""
NUM_LISTS = 4


async def submit(gateway: AttackedGateway, name: str, document: str, text: str) -> str:
    """Send a document to be written later; return the path of its operation."""
    answer = await gateway.client.post(
        "/v1/documents",
        json={"id": document, "text": text, "content_type": "markdown"},
        headers=bearer(name) | {"Prefer": "respond-async"},
    )
    assert answer.status_code == 202, answer.text
    return answer.headers["Location"]


async def state(gateway: AttackedGateway, name: str, path: str) -> str:
    answer = await gateway.client.get(path, headers=bearer(name))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["state"])


@pytest.mark.timeout(900)
async def test_lists_without_end_neither_delay_another_tenant_nor_outlive_a_delete(
    tiny_model: Path, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    env = environment(tmp_path / "data", tiny_model, RAGCACHE_LISTEN=address)
    async with AsyncExitStack() as first:
        retriever, _, _ = await first.enter_async_context(running(env))
        gateway = await first.enter_async_context(
            attacked_gateway(tiny_model, tmp_path, RAGCACHE_RETRIEVER=address)
        )
        red = [await submit(gateway, "red", f"red-{i}", f"{LIST}{i}") for i in range(NUM_LISTS)]
        # A document that is written at once, and one that is written later.
        text = "The pager is on the desk. " * 20
        body = json.dumps({"id": "now", "text": text}).encode()
        now = await gateway.post("blue", "/v1/documents", body)
        assert now.status_code == 200, now.text
        later = await submit(gateway, "blue", "later", text)
        await until(lambda: is_done(gateway, later))
        assert await state(gateway, "red", red[-1]) == "pending"
        kept = await submit(gateway, "blue", "kept", text * 300)
        retriever.kill()
        gateway.process.kill()
    async with AsyncExitStack() as second:
        await second.enter_async_context(running(env))
        gateway = await second.enter_async_context(
            attacked_gateway(tiny_model, tmp_path, RAGCACHE_RETRIEVER=address)
        )
        assert await state(gateway, "red", red[-1]) == "pending"
        assert (await gateway.client.get(red[-1], headers=bearer("blue"))).status_code == 404
        await until(lambda: is_done(gateway, kept), timeout_s=600)
        for i in range(NUM_LISTS):
            answer = await gateway.client.delete(f"/v1/documents/red-{i}", headers=bearer("red"))
            assert answer.status_code == 200, answer.text
        assert {await state(gateway, "red", path) for path in red} == {"cancelled"}
        listed = await gateway.client.get("/v1/documents", headers=bearer("blue"))
        assert [one["id"] for one in listed.json()["data"]] == ["kept", "later", "now"]


async def is_done(gateway: AttackedGateway, path: str) -> bool:
    return await state(gateway, "blue", path) == "done"
