"""A sync against a real retriever behind a real gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ragcache_cli.clients.gateway_client import GatewayApiClient, GatewayTarget, RequestRefused
from ragcache_cli.commands.sync import Sync
from ragcache_cli.sources.read import Surroundings
from ragcache_cli.sources.reading import Scratch
from ragcache_cli.sources.sync_plan import Result
from ragcache_core.access.networks import AddressRules, parse_networks
from ragcache_operator.spec.manifest import parse_collection
from ragcache_retriever.knowledge_base.coordinator import KnowledgeBase
from ragcache_retriever.service import RetrieverService
from tests.kit.gateway import CONFIG, World
from tests.kit.pdf_file import SCAN, PdfPage, lines, pdf_file
from tests.kit.retriever import make_knowledge_base, tokenizer_of
from tests.kit.sources import HTML, Page, Repository, Web, pdf, serving_web, tar_gz

MIB = 1 << 20


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    with serving_web(tmp_path / "repositories") as serving:
        yield serving


@dataclass
class Platform:
    """A gateway over a retriever, and folders that a pod would mount."""

    world: World
    folder: Path
    knowledge_base: KnowledgeBase
    progress: list[tuple[int, int]] = field(default_factory=list)
    slept_s: list[float] = field(default_factory=list)

    def write(self, index: int, **files: str) -> None:
        """What is mounted for a source; '_' in a name stands for '.'."""
        mount = self.folder / "mounts" / f"source-{index}"
        mount.mkdir(parents=True, exist_ok=True)
        for old in mount.iterdir():
            old.unlink()
        for name, text in files.items():
            (mount / name.replace("_", ".")).write_text(text)

    async def sync(
        self, *sources: dict[str, Any], remove: bool = False, name: str = "faq", **spec: Any
    ) -> Result:
        manifest = manifest_of(*sources, name=name, **spec)
        collection = parse_collection(manifest)
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        loopback = AddressRules(parse_networks("test", ["127.0.0.0/8"]))
        here = Surroundings(self.folder / "mounts", {}, Scratch(scratch, 64 * MIB), loopback)

        async def sleep(seconds: float) -> None:
            self.slept_s.append(seconds)

        target = GatewayTarget(self.world.base_url)
        async with GatewayApiClient(target, patience_s=5, sleep=sleep) as client:
            sync = Sync(client, collection, lambda done, total: self.progress.append((done, total)))
            return await (sync.remove() if remove else sync.bring(here))

    async def documents(self, collection: str = "docs") -> dict[str, dict[str, Any]]:
        reply = await self.world.client.get("/v1/documents", params={"collection": collection})
        return {document["id"]: document for document in reply.json()["data"]}

    async def text(self, document: str) -> str:
        reply = await self.world.client.get(
            f"/v1/documents/{document}", params={"collection": "docs"}
        )
        return str(reply.json()["text"])

    async def put(self, document: str, text: str) -> None:
        body = {"collection": "docs", "id": document, "text": text}
        (await self.world.client.post("/v1/documents", json=body)).raise_for_status()


def manifest_of(*sources: dict[str, Any], name: str = "faq", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "ragcache.dev/v1alpha1",
        "kind": "RagCollection",
        "metadata": {"name": name, "namespace": "team"},
        "spec": {
            "cacheRef": {"name": "cache"},
            "collection": "docs",
            "sources": list(sources),
            **spec,
        },
    }


def config_map(name: str) -> dict[str, Any]:
    return {"configMap": {"name": name}}


@pytest.fixture
async def platform(tiny_model: Path, tmp_path: Path) -> AsyncGenerator[Platform, None]:
    async with AsyncExitStack() as stack:
        knowledge_base = make_knowledge_base(tmp_path / "retriever", tokenizer_of(tiny_model))
        stack.push_async_callback(knowledge_base.close)
        world = World(CONFIG)
        # The one part that a sync is about is no stand-in here.
        world.retriever = RetrieverService(knowledge_base)  # type: ignore[assignment]
        await world.start(stack, tiny_model)
        await knowledge_base.load()
        yield Platform(world, tmp_path, knowledge_base)


async def test_what_changes_is_written_and_what_is_gone_is_deleted(platform: Platform) -> None:
    platform.write(0, a_md="# A\n\nAlpha.", b_txt="Beta.")
    first = await platform.sync(config_map("faq"))
    assert (first.written, first.unchanged, first.deleted) == (2, 0, 0)
    assert (first.documents, first.chunks, first.failures) == (2, 2, ())
    assert platform.progress == [(0, 2), (1, 2), (2, 2)]
    held = await platform.documents()
    assert held["a.md"]["title"] == "A"
    assert held["b.txt"]["content_type"] == "text"
    assert held["a.md"]["metadata"]["ragcache-source"] == "team/faq"

    again = await platform.sync(config_map("faq"))
    assert (again.written, again.unchanged, again.deleted) == (0, 2, 0)
    assert again.revision == first.revision

    platform.write(0, a_md="# A\n\nAnother.", c_md="Gamma.")
    changed = await platform.sync(config_map("faq"))
    assert (changed.written, changed.unchanged, changed.deleted) == (2, 0, 1)
    assert changed.revision != first.revision
    assert set(await platform.documents()) == {"a.md", "c.md"}
    assert await platform.text("a.md") == "# A\n\nAnother."


async def test_without_prune_nothing_is_deleted(platform: Platform) -> None:
    platform.write(0, a_md="A", b_md="B")
    await platform.sync(config_map("faq"), prune=False)
    platform.write(0, a_md="A")
    assert (await platform.sync(config_map("faq"), prune=False)).documents == 2


async def test_documents_of_others_are_never_touched(platform: Platform) -> None:
    await platform.world.client.put("/v1/collections/docs", json={})
    await platform.put("mine.md", "By hand.")
    await platform.put("a.md", "By hand too.")
    platform.write(0, a_md="A", b_md="B")
    done = await platform.sync(config_map("faq"))
    [failure] = done.failures
    assert failure.document == "a.md"
    assert failure.problem.startswith("is in the collection already")
    assert await platform.text("a.md") == "By hand too."

    other = await platform.sync(config_map("faq"), name="other")
    assert [one.document for one in other.failures] == ["a.md", "b.md"]
    assert "belongs to the RagCollection team/faq" in other.failures[1].problem

    removed = await platform.sync(config_map("faq"), remove=True)
    assert (removed.deleted, removed.documents) == (1, 0)
    assert set(await platform.documents()) == {"a.md", "mine.md"}


async def test_a_source_that_fails_keeps_its_documents_and_stops_no_other(
    platform: Platform, web: Web
) -> None:
    guide = {"http": {"url": f"{web.url}/guide.tar.gz"}}
    web.pages["/guide.tar.gz"] = Page(tar_gz({"guide/a.md": b"A", "guide/b.md": b"B"}))
    platform.write(0, a_md="A", b_md="B")
    both = await platform.sync(config_map("faq"), guide)
    assert (both.written, both.failures) == (4, ())
    assert set(await platform.documents()) == {"faq/a.md", "faq/b.md", "guide/a.md", "guide/b.md"}

    web.pages["/guide.tar.gz"] = Page(status=503)
    platform.write(0, a_md="A changed")
    half = await platform.sync(config_map("faq"), guide)
    assert half.finished
    assert (half.written, half.deleted, half.documents) == (1, 1, 3)
    assert [one.source for one in half.failures] == [f"http {web.url}/guide.tar.gz"]
    assert half.exit_status == 1
    assert "guide/a.md" in await platform.documents()


async def test_an_empty_source_deletes_nothing(platform: Platform) -> None:
    platform.write(0, a_md="A")
    await platform.sync(config_map("faq"))
    platform.write(0)
    done = await platform.sync(config_map("faq"))
    assert (done.deleted, done.documents) == (0, 1)
    assert "holds no file of .txt, .md" in done.failures[0].problem


async def test_documents_of_other_formats_are_followed(platform: Platform) -> None:
    folder = platform.folder / "mounts" / "source-0"
    platform.write(0, a_md="A")
    (folder / "b.html").write_bytes(HTML)
    (folder / "c.pdf").write_bytes(pdf(["Page one."], title="Report"))
    (folder / "d.jsonl").write_text('{"id": "d1", "text": "D1", "metadata": {"team": "core"}}')
    first = await platform.sync(config_map("faq"))
    assert (first.written, first.failures) == (4, ())
    held = await platform.documents()
    assert held["c.pdf"]["title"] == "Report"
    assert held["d1"]["metadata"]["team"] == "core"
    assert held["d1"]["metadata"]["ragcache-source"] == "team/faq"
    assert (await platform.text("b.html")).startswith("# Billing")
    assert (await platform.sync(config_map("faq"))).unchanged == 4
    (folder / "c.pdf").write_bytes(pdf(["Page two."]))
    (folder / "d.jsonl").write_text('{"id": "d2", "text": "D2"}')
    changed = await platform.sync(config_map("faq"))
    assert (changed.written, changed.unchanged, changed.deleted) == (2, 2, 1)
    assert set(await platform.documents()) == {"a.md", "b.html", "c.pdf", "d2"}


async def test_warnings_stay_in_the_result_while_the_document_is_unchanged(
    platform: Platform,
) -> None:
    platform.write(0, a_md="A")
    scanned = platform.folder / "mounts" / "source-0" / "b.pdf"
    scanned.write_bytes(pdf_file([PdfPage(lines("One.")), PdfPage(SCAN)]))
    for written in (2, 0):
        done = await platform.sync(config_map("faq"))
        assert (done.written, done.exit_status) == (written, 0)
        (warning,) = done.warnings
        assert (warning.source, warning.document) == ("configMap faq", "b.pdf")
        assert "page 2" in warning.problem
    scanned.write_bytes(pdf(["One.", "Two."]))
    assert (await platform.sync(config_map("faq"))).warnings == ()


async def test_a_text_in_another_encoding_is_synced(platform: Platform) -> None:
    platform.write(0, a_md="A")
    (platform.folder / "mounts" / "source-0" / "b.txt").write_bytes("Größe".encode("utf-16"))
    assert (await platform.sync(config_map("faq"))).failures == ()
    assert await platform.text("b.txt") == "Größe"


async def test_a_document_that_fails_keeps_what_was_there(platform: Platform) -> None:
    platform.write(0, a_md="A", b_md="B")
    await platform.sync(config_map("faq"))
    platform.write(0, a_md="binary \0 now", b_md="B changed")
    done = await platform.sync(config_map("faq"))
    assert (done.written, done.deleted) == (1, 0)
    (failure,) = done.failures
    assert failure.document == "a.md"
    assert "is binary" in failure.problem
    assert await platform.text("a.md") == "A"


async def test_a_repository_is_followed(platform: Platform, web: Web) -> None:
    repository = Repository(web.repositories / "handbook")
    first = repository.commit({"README.md": b"R", "docs/a.md": b"A"})
    source = {"git": {"url": f"{web.url}/git/handbook/.git"}}
    done = await platform.sync(source)
    assert (done.written, done.revision) == (2, first[:12])
    second = repository.commit({"docs/a.md": None, "docs/b.md": b"B"})
    done = await platform.sync(source)
    assert (done.written, done.deleted, done.revision) == (1, 1, second[:12])
    assert set(await platform.documents()) == {"README.md", "docs/b.md"}


async def test_another_source_beside_the_first_gives_all_documents_longer_names(
    platform: Platform,
) -> None:
    platform.write(0, a_md="A")
    platform.write(1, a_md="Another A")
    await platform.sync(config_map("faq"))
    done = await platform.sync(config_map("faq"), config_map("more"))
    assert (done.written, done.deleted) == (2, 1)
    assert set(await platform.documents()) == {"faq/a.md", "more/a.md"}


async def test_chunking_is_the_collections_own(platform: Platform) -> None:
    platform.write(0, a_md="word " * 200)
    await platform.sync(config_map("faq"), chunking={"size": 32, "overlap": 4, "window": 2})
    settings = (await platform.world.client.get("/v1/collections/docs")).json()
    assert settings["chunking"] == {"size_tokens": 32, "overlap_tokens": 4}
    assert settings["window"] == 2
    await platform.sync(config_map("faq"), chunking={"size": 16, "overlap": 0, "window": 0})
    await platform.knowledge_base.wait_until_idle()  # it splits in the background
    finer = (await platform.world.client.get("/v1/collections/docs")).json()
    assert finer["chunks"] > settings["chunks"]
    # Unset settings are not changed, because another owner may have set them.
    await platform.sync(config_map("faq"))
    after = (await platform.world.client.get("/v1/collections/docs")).json()
    assert after["chunking"]["size_tokens"] == 16


async def test_a_sync_keeps_the_settings_that_it_does_not_set(platform: Platform) -> None:
    own = {
        **{"index": "flat", "max_documents": 3, "max_text_bytes": 500, "window": 0},
        "lexical_weight": 0.7,
        "labels": False,
    }
    await platform.world.client.put("/v1/collections/docs", json=own)
    await platform.put("other.md", "Another owner's.")
    platform.write(0, a_md="word " * 40)
    await platform.sync(config_map("faq"), chunking={"size": 32, "overlap": 4, "window": 2})
    after = (await platform.world.client.get("/v1/collections/docs")).json()
    assert {name: after[name] for name in own} == {**own, "window": 2}
    assert after["chunking"] == {"size_tokens": 32, "overlap_tokens": 4}
    # The quota still holds: the other documents of the source do not fit.
    platform.write(0, a_md="A", b_md="B", c_md="C")
    done = await platform.sync(config_map("faq"))
    assert (done.written, len(done.failures)) == (2, 1)
    assert "3" in done.failures[0].problem


async def test_index_quotas_and_weight_are_set_by_the_object(platform: Platform) -> None:
    platform.write(0, a_md="A")
    await platform.sync(
        config_map("faq"),
        index="hnsw",
        maxDocuments=1,
        maxTextBytes=1000,
        lexicalWeight=0.25,
        labels=False,
    )
    created = (await platform.world.client.get("/v1/collections/docs")).json()
    assert (created["index"], created["max_documents"], created["max_text_bytes"]) == (
        "hnsw",
        1,
        1000,
    )
    platform.write(0, a_md="A", b_md="B")
    assert len((await platform.sync(config_map("faq"))).failures) == 1
    # 0 removes a quota; what is unset stays.
    assert (await platform.sync(config_map("faq"), maxDocuments=0)).failures == ()
    after = (await platform.world.client.get("/v1/collections/docs")).json()
    assert (after["index"], after["max_documents"], after["max_text_bytes"]) == ("hnsw", 0, 1000)
    assert (after["lexical_weight"], after["labels"]) == (0.25, False)


async def test_removing_what_never_was_is_done(platform: Platform) -> None:
    assert (await platform.sync(config_map("faq"), remove=True)).exit_status == 0


async def test_more_than_a_page_is_compared(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_cli.clients.gateway_client._PAGE", 2)
    platform.write(0, **{f"d{n}_md": f"Document {n}" for n in range(5)})
    assert (await platform.sync(config_map("faq"))).written == 5
    assert (await platform.sync(config_map("faq"))).unchanged == 5
    platform.write(0, d0_md="Document 0")
    assert (await platform.sync(config_map("faq"))).deleted == 4


async def test_a_gateway_that_is_away_is_waited_for_and_then_given_up(platform: Platform) -> None:
    platform.write(0, a_md="A")
    platform.world.base_url = "http://127.0.0.1:9"
    collection = parse_collection(manifest_of(config_map("faq")))
    now = 0.0
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += seconds

    client = GatewayApiClient(
        GatewayTarget("http://127.0.0.1:9"), patience_s=5, clock=lambda: now, sleep=sleep
    )
    async with client:
        done = await Sync(client, collection, lambda *_: None).remove()
    assert waits == [1.0] * 5
    assert not done.finished
    assert "nothing answers at http://127.0.0.1:9" in done.failures[0].problem


async def test_a_busy_gateway_says_when_to_come_back() -> None:
    replies = iter([(429, "3"), (503, "0"), (200, "")])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        status, after = next(replies)
        body = b'{"name": "docs"}'
        head = f"HTTP/1.1 {status} X\r\nRetry-After: {after}\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        target = GatewayTarget(f"http://127.0.0.1:{port}")
        async with GatewayApiClient(target, patience_s=60, sleep=sleep) as client:
            assert await client.find_collection("docs") == {"name": "docs"}
    assert waits == [3.0, 1.0]


async def test_what_the_gateway_refuses_of_a_collection_is_a_mistake(platform: Platform) -> None:
    platform.write(0, a_md="A")
    async with GatewayApiClient(GatewayTarget(platform.world.base_url), patience_s=5) as client:
        with pytest.raises(RequestRefused):
            await client.find_collection("no\nname")


async def run_command(*arguments: str, **environment: str) -> tuple[int, list[str], str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ragcache_cli", "sync", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    output, complaint = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode().splitlines(), complaint.decode()


async def test_the_command_prints_progress_and_leaves_its_result(
    platform: Platform, tmp_path: Path
) -> None:
    platform.write(0, a_md="A", b_md="B")
    result = tmp_path / "result"
    common = (
        *("--object", json.dumps(manifest_of(config_map("faq"), config_map("gone")))),
        *("--mounts", str(tmp_path / "mounts"), "--gateway", platform.world.base_url),
        *("--result", str(result)),
    )
    status, lines, _ = await run_command(*common)
    assert status == 1
    assert [json.loads(line) for line in lines[:3]] == [{"done": n, "total": 2} for n in range(3)]
    assert lines[3:] == [result.read_text()]
    said = json.loads(lines[-1])
    assert (said["documents"], said["written"], said["failureCount"]) == (2, 2, 1)
    assert said["failures"][0]["source"] == "configMap gone"

    status, lines, _ = await run_command(*common, "--remove")
    assert (status, json.loads(lines[-1])["deleted"]) == (0, 2)


async def test_the_commands_mistakes_name_the_field(tmp_path: Path) -> None:
    whole = manifest_of(config_map("faq"))
    two = {"git": {"url": "https://h/x"}, "configMap": {"name": "x"}}
    for manifest, words in (
        ("{", "--object: is no JSON"),
        ("[]", "--object: is no JSON object"),
        (json.dumps({**whole, "spec": {**whole["spec"], "sources": [two]}}), "spec.sources[0]"),
    ):
        result = tmp_path / "result"
        status, lines, complaint = await run_command(
            *("--object", manifest, "--gateway", "http://127.0.0.1:9", "--result", str(result))
        )
        assert status == 2
        assert words in complaint
        said = json.loads(result.read_text())
        assert json.loads(lines[-1]) == said
        assert (said["finished"], words in said["failures"][0]["problem"]) == (False, True)


@pytest.mark.parametrize("silent", ["gateway", "source"])
async def test_the_command_ends_when_it_is_told_to(tmp_path: Path, silent: str) -> None:
    """As a container's first process it hears of its end only if it asks to."""
    heard = asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.set()
        await reader.read()
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read()
        writer.close()

    async with (
        await asyncio.start_server(never_answer, "127.0.0.1", 0) as silence,
        await asyncio.start_server(answer, "127.0.0.1", 0) as gateway,
    ):
        silent_port = silence.sockets[0].getsockname()[1]
        port = gateway.sockets[0].getsockname()[1] if silent == "source" else silent_port
        source = {"http": {"url": f"http://127.0.0.1:{silent_port}/faq.md"}}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ragcache_cli", "sync"),
            *("--object", json.dumps(manifest_of(source))),
            *("--gateway", f"http://127.0.0.1:{port}", "--allow-network", "127.0.0.1"),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        await heard.wait()
        process.send_signal(signal.SIGTERM)
        _, complaint = await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert complaint == b""
    assert os.listdir(tmp_path) == []
