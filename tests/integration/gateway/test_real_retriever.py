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


def document(name: str | int, **metadata: Any) -> dict[str, Any]:
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
        "max_tokens": 8,  # both manuals are to fit beside the answer
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


async def test_a_hit_names_its_pages(platform: Platform) -> None:
    content = pdf(["Refunds take two days.", "Invoices go to the desk."])
    for name, sent in (("a.pdf", content), ("b.txt", b"Refunds take two days.")):
        await platform.world.client.post("/v1/documents", files={"file": (name, sent)})
    body = {"query": "refunds two days"}
    hits = (await platform.world.client.post("/v1/search", json=body)).json()["data"]
    pages = {hit["document_id"]: (hit["page"], hit["page_end"]) for hit in hits}
    assert pages == {"a.pdf": (1, 2), "b.txt": (None, None)}


MARKDOWN = """---
title: Refunds
team: billing
---
<!-- # Draft -->

Refunds take two days.
"""


async def test_front_matter_and_comments_of_markdown_are_no_text(platform: Platform) -> None:
    await platform.batch(
        {"id": "a.md", "text": MARKDOWN},
        {"id": "b.md", "text": MARKDOWN, "title": "Own", "metadata": {"team": "core"}},
        {"id": "c.txt", "text": MARKDOWN},
    )
    client = platform.world.client
    await client.post("/v1/documents", files={"file": ("d.md", MARKDOWN.encode())})
    found = {}
    for name in ("a.md", "b.md", "c.txt", "d.md"):
        one = (await client.get(f"/v1/documents/{name}")).json()
        found[name] = (one["title"], one["metadata"], one["text"])
    text = "Refunds take two days.\n"
    assert found == {
        "a.md": ("Refunds", {"team": "billing"}, text),
        "b.md": ("Own", {"team": "core"}, text),
        "c.txt": ("c.txt", {}, MARKDOWN),
        "d.md": ("Refunds", {"team": "billing"}, text),
    }


async def test_text_formats_are_found_by_name_and_by_type(platform: Platform) -> None:
    notebook = {"cells": [{"cell_type": "markdown", "source": "Steps."}], "metadata": {}}
    files = {
        "parts.csv": b"part,price\nAX-1,4\n",
        "parts.tsv": b"part\tprice\nAX-1\t4\n",
        "site.json": b'{"site": {"zone": "eu"}}',
        "guide.mdx": b"import A from 'a'\n\n<A>Useful.</A>\n",
        "notes.rst": b"Notes\n=====\n\nUseful.\n",
        "plan.ipynb": json.dumps(notebook).encode(),
    }
    form = [("file", one) for one in files.items()]
    await platform.world.client.post("/v1/documents:batch", files=form)

    async def stored(name: str) -> tuple[str, str]:
        found = (await platform.world.client.get(f"/v1/documents/{name}")).json()
        return found["content_type"], found["text"]

    table = "| part | price |\n| --- | --- |\n| AX-1 | 4 |"
    assert await stored("parts.csv") == await stored("parts.tsv") == ("markdown", table)
    assert await stored("site.json") == ("text", "site.zone: eu")
    assert await stored("guide.mdx") == ("markdown", "Useful.")
    assert await stored("notes.rst") == ("markdown", "# Notes\n\nUseful.")
    assert await stored("plan.ipynb") == ("markdown", "Steps.")

    text = files["parts.csv"].decode()
    await platform.batch({"id": "a", "text": text, "content_type": "text/csv"})
    assert await stored("a") == ("markdown", table)
    # The client may have read the text of a notebook itself.
    await platform.batch({"id": "b.ipynb", "text": "Steps."}, {"id": "c.rst", "text": "*x*"})
    assert await stored("b.ipynb") == ("text", "Steps.")
    assert (await stored("c.rst"))[0] == "markdown"


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


async def test_metadata_keeps_its_types_and_filters_find_them(platform: Platform) -> None:
    events = await platform.batch(
        document(1001, year=2024, critical=True, tags=["pump", "hall C"], seen=None),
        document("b", year="2024", critical=False, tags=["valve"], date="2024-02-20"),
        document("c", year=2025.5, tags=[3, "pump"], date="2024-09-01T10:00:00Z"),
    )
    assert events[-1]["written"] == 3
    listed = (await platform.world.client.get("/v1/documents")).json()["data"]
    assert [one["metadata"] for one in listed] == [
        {"year": 2024, "critical": True, "tags": ["pump", "hall C"]},
        {"year": "2024", "critical": False, "tags": ["valve"], "date": "2024-02-20"},
        {"year": 2025.5, "tags": [3, "pump"], "date": "2024-09-01T10:00:00Z"},
    ]

    async def found(**condition: Any) -> list[str]:
        return await platform.search("billing", filter={"must": [condition]})

    assert await found(key="id", match={"value": 1001}) == ["1001"]
    assert await found(key="year", match={"value": 2024}) == ["1001", "b"]
    assert await found(key="year", match={"value": 2025.5}) == ["c"]
    assert await found(key="year", range={"gt": 2024}) == ["c"]
    assert await found(key="critical", match={"value": True}) == ["1001"]
    assert await found(key="tags", match={"any": ["pump", "none"]}) == ["1001", "c"]
    assert await found(key="tags", match={"value": 3}) == ["c"]
    assert await found(key="tags", prefix="hall") == ["1001"]
    assert await found(key="date", range={"gte": "2024-01-01"}) == ["b", "c"]
    assert await found(key="date", range={"lt": "2024-02-21"}) == ["b"]
    assert await found(key="date", range={"lte": "2024-09-01"}) == ["b", "c"]


async def test_another_type_is_another_content(platform: Platform) -> None:
    await platform.batch(document("a", year=2024))
    *_, summary = await platform.batch(document("a", year="2024"))
    assert summary["written"] == 1
    *_, summary = await platform.batch(document("a", year="2024"))
    assert summary["unchanged"] == 1


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
