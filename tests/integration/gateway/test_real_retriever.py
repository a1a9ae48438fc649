"""Documents, filters, quotas and backups through a gateway and a real retriever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from tokenizers import Tokenizer

from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.service import RetrieverService
from ragcache_retriever.store.sqlite.files.backup import SqliteBackups
from tests.kit.gateway import CONFIG, FakeRetriever, World
from tests.kit.retriever import make_knowledge_base, tokenizer_of
from tests.kit.sources import HTML, pdf
from tests.kit.wait import until

JSON_LINES = {"Content-Type": "application/jsonl"}


@dataclass
class Platform:
    """A gateway whose retriever is real. restarts: set when the retriever ends to restart."""

    world: World
    knowledge_base: KnowledgeBase
    restarts: asyncio.Event

    async def batch(self, *documents: dict[str, Any], collection: str = "default") -> Any:
        """Write documents; return the events."""
        body = "\n".join(map(json.dumps, documents))
        reply = await self.world.client.post(
            f"/v1/documents:batch?collection={collection}", content=body, headers=JSON_LINES
        )
        assert reply.status_code == 200, reply.text
        return [json.loads(one[6:]) for one in reply.text.split("\n\n")[:-2]]

    async def search(self, query: str, **options: Any) -> list[str]:
        """Return the ids of the documents found."""
        body = {"query": query, "top_k": 10, **options}
        reply = await self.world.client.post("/v1/search", json=body)
        assert reply.status_code == 200, reply.text
        return sorted({hit["document_id"] for hit in reply.json()["data"]})


async def start(stack: AsyncExitStack, folder: Path, model: Path) -> Platform:
    knowledge_base = make_knowledge_base(folder, tokenizer_of(model))
    stack.push_async_callback(knowledge_base.close)
    restarts = asyncio.Event()
    service = RetrieverService(knowledge_base, backups=SqliteBackups(folder), restart=restarts.set)
    world = World(CONFIG, retriever=cast("FakeRetriever", service))
    await world.start(stack, model)
    await knowledge_base.load()
    return Platform(world, knowledge_base, restarts)


@pytest.fixture
async def platform(tiny_model: Path, tmp_path: Path) -> AsyncGenerator[Platform, None]:
    async with AsyncExitStack() as stack:
        yield await start(stack, tmp_path / "retriever", tiny_model)


def document(name: str, **metadata: str) -> dict[str, Any]:
    return {"id": name, "text": f"Billing of {name} runs in eu-north.", "metadata": metadata}


async def test_documents_of_all_formats_are_found(platform: Platform) -> None:
    files = [("file", ("a.html", HTML)), ("file", ("b.pdf", pdf(["Refunds take two days."])))]
    await platform.world.client.post("/v1/documents:batch", files=files)
    listed = (await platform.world.client.get("/v1/documents")).json()["data"]
    assert [(one["id"], one["title"]) for one in listed] == [
        ("a.html", "Billing"),
        ("b.pdf", "b.pdf"),
    ]
    assert [one["content_type"] for one in listed] == ["markdown", "text"]
    assert "b.pdf" in await platform.search("refunds two days")


def manual(name: str, noise: str, rest: str) -> dict[str, Any]:
    """Return a manual whose sections do not say what machine they are about.

    Args:
        rest: Other text of the section about noise.
    """
    sections = {
        "Electrical data": "The plug must be earthed. The cable is kept dry. " * 3,
        "Environment": f"The noise level is {noise}. {rest}",
    }
    text = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    return {
        "id": f"manuals/{name}.md",
        "text": f"# Band saw {name}\n\nRead it before the first use.\n\n{text}",
        "content_type": "markdown",
    }


async def test_the_prompt_names_the_document_before_each_passage(
    platform: Platform, tiny_model: Path
) -> None:
    await platform.batch(
        manual("Ostra", "61 dB", "Dust shortens the life of all its parts, so clean it weekly."),
        manual("Velta", "74 dB", "Two windows and a fan let the heat of summer days out."),
    )
    body = {
        "messages": [{"role": "user", "content": "Which band saw has a noise level of 61 dB?"}],
        "ragcache": {"top_k": 8},
    }
    reply = await platform.world.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    ids = platform.world.engine.requests[-1]["prompt"]
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    prompt = tokenizer.decode(ids, skip_special_tokens=False)
    before = prompt[: prompt.index("61 dB")]
    assert before.rfind("Band saw") == before.rfind("Band saw Ostra") > 0, prompt
    assert "\n\n[Band saw Ostra" in before, prompt
    texts = [one["text_preview"] for one in reply.json()["ragcache"]["citations"]]
    assert texts
    assert not any("[Band saw" in text for text in texts)


async def test_a_filter_limits_a_search_to_documents(platform: Platform) -> None:
    events = await platform.batch(
        document("a", team="core", year="2023"),
        document("b", team="core", year="2025"),
        document("drafts/c", team="core", year="2025"),
        document("d", team="web"),
    )
    assert events[-1]["written"] == 4
    assert await platform.search("billing") == ["a", "b", "d", "drafts/c"]
    core = {"key": "team", "match": {"value": "core"}}
    assert await platform.search("billing", filter={"must": [core]}) == ["a", "b", "drafts/c"]
    wanted = {
        "must": [core, {"key": "year", "range": {"gte": 2024}}],
        "must_not": [{"key": "id", "prefix": "drafts/"}],
    }
    assert await platform.search("billing", filter=wanted) == ["b"]
    missing = {
        "should": [{"key": "year", "exists": False}, {"key": "year", "match": {"value": 2023}}]
    }
    assert await platform.search("billing", filter=missing) == ["a", "d"]
    assert await platform.search("billing", filter={"must_not": [core]}) == ["d"]


async def test_a_hit_names_the_version_that_it_is_from(platform: Platform) -> None:
    await platform.batch(document("a"))
    listed = (await platform.world.client.get("/v1/documents")).json()["data"][0]
    reply = await platform.world.client.post("/v1/search", json={"query": "billing"})
    (hit,) = reply.json()["data"]
    assert hit["version"] == listed["content_hash"] != ""
    assert hit["updated"] == "2023-11-14T22:13:20.000Z"


async def test_a_quota_refuses_documents_and_stops_no_other(platform: Platform) -> None:
    settings = {"max_documents": 2, "max_text_bytes": 100}
    reply = await platform.world.client.put("/v1/collections/small", json=settings)
    assert reply.json()["max_documents"] == 2
    large = {"id": "large", "text": "word " * 100}
    for one in (large, document("a"), document("b"), document("c")):
        *_, end, summary = await platform.batch(one, collection="small")
        if one["id"] in ("large", "c"):
            assert (end["state"], summary["failed"]) == ("failed", 1)
    found = (await platform.world.client.get("/v1/collections/small")).json()
    assert (found["documents"], found["text_bytes"]) == (2, 2 * len(document("a")["text"]))
    (again,) = [
        one
        for one in await platform.batch(document("a"), collection="small")
        if one.get("state") == "done"
    ]
    assert again["changed"] is False


async def test_a_backup_brings_all_documents_to_another_retriever(
    platform: Platform, tiny_model: Path, tmp_path: Path
) -> None:
    await platform.batch(*[document(f"d{i}") for i in range(20)])
    file = (await platform.world.client.get("/v1/backup")).content
    other = tmp_path / "other"
    async with AsyncExitStack() as stack:
        target = await start(stack, other, tiny_model)
        await target.batch(document("old"))
        reply = await target.world.client.post("/v1/restore", content=file[:-1])
        assert reply.status_code == 400
        assert not target.restarts.is_set()

        async def restored() -> httpx.Response | None:
            reply = await target.world.client.post("/v1/restore", content=file)
            return None if reply.status_code == 503 else reply

        # The retriever may not have noticed yet that the refused one has ended.
        done = await until(restored)
        assert done is not None
        assert done.json() == {"object": "backup.restored", "documents": 20}
        async with asyncio.timeout(60):
            await target.restarts.wait()
    async with AsyncExitStack() as stack:
        restarted = await start(stack, other, tiny_model)
        listed = (await restarted.world.client.get("/v1/documents")).json()["data"]
        assert sorted(one["id"] for one in listed) == sorted(f"d{i}" for i in range(20))
        assert "d7" in await restarted.search("billing of d7")
