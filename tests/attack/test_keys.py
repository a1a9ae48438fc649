"""What a key reaches that is not its own, and what the audit log has of each try.

The gateway and the retriever are processes. The engine and the store are real servers with fixed
answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from harness.processes import free_port
from tests.kit.gateway import BUILTIN, OPERATOR, World, bearer, key, world, write_keys
from tests.kit.wait import until

SECRET = "The merger with Initech closes in May."
PROMPT = "When does the merger close?"
ENTRIES = {
    "red-ask": 'scopes = ["ask"]\ntenant = "red"\ncollections = ["red"]',
    "blue-ask": 'scopes = ["ask"]\ntenant = "blue"\ncollections = ["blue"]',
    "blue-write": 'scopes = ["write"]\ntenant = "blue"\ncollections = ["blue"]',
    "blue-view": 'scopes = ["view"]\ntenant = "blue"',
    "admin": 'scopes = ["admin"]',
}


@dataclass
class Platform:
    """A gateway in a process of its own, with an audit log."""

    process: asyncio.subprocess.Process
    client: httpx.AsyncClient
    keys: Path
    audit: Path
    fakes: World

    async def ask(self, name: str, collection: str, **more: Any) -> httpx.Response:
        body = {
            "messages": [{"role": "user", "content": PROMPT}],
            "ragcache": {"collection": collection, **more},
        }
        return await self.send(name, "POST", "/v1/chat/completions", json=body)

    async def send(self, name: str, method: str, path: str, **more: Any) -> httpx.Response:
        return await self.client.request(method, path, headers=bearer(name), **more)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]

    async def line(self, **wanted: Any) -> dict[str, Any]:
        """Wait for a line with these fields."""

        def found() -> list[dict[str, Any]]:
            return [one for one in self.lines() if wanted.items() <= one.items()]

        await until(lambda: bool(found()), f"a line with {wanted}", timeout_s=20)
        return found()[-1]


@asynccontextmanager
async def child(*command: str, **env: str) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, env={**os.environ, **env}, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()


@asynccontextmanager
async def platform(
    folder: Path, model: Path, tenants: str = "", **settings: str
) -> AsyncGenerator[Platform, None]:
    keys = write_keys(folder / "keys.toml", ENTRIES)
    keys.write_text(tenants + keys.read_text())
    async with AsyncExitStack() as stack:
        fakes = await stack.enter_async_context(world(model))
        command = ("-m", "tests.kit.retriever_process", str(folder / "documents"), str(model))
        retriever = await stack.enter_async_context(child(*command))
        assert retriever.stdout is not None
        address = f"127.0.0.1:{int(await retriever.stdout.readline())}"
        port = free_port()
        (engine,), (shard,) = fakes.config.engines, fakes.config.cachestore.current()
        found: dict[str, str] = {
            "LISTEN": f"127.0.0.1:{port}",
            "RETRIEVER": address,
            "ENGINES": str(engine),
            "CACHESTORE": shard,
            "MODEL": str(model),
            "MODEL_NAME": "tiny",
            "MAX_MODEL_LEN": "1024",
            "API_KEYS_FILE": str(keys),
            "BUILTIN_KEYS": ",".join(f"{name}={text}" for name, text in BUILTIN),
            "AUDIT": str(folder / "audit" / "gateway.jsonl"),
            **settings,
        }
        env = {f"RAGCACHE_{name}": value for name, value in found.items()}
        process = await stack.enter_async_context(child("-m", "ragcache_gateway", **env))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)
        )
        found_platform = Platform(process, client, keys, Path(found["AUDIT"]), fakes)
        await until(lambda: is_answering(client), "a gateway that answers")
        yield found_platform


async def is_answering(client: httpx.AsyncClient) -> bool:
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    try:
        return (await client.get("/v1/status", headers=headers)).status_code == 200
    except httpx.TransportError:
        return False


@pytest_asyncio.fixture
async def attacked(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Platform]:
    """A platform in which the tenant red has a document and has asked about it."""
    async with platform(tmp_path, tiny_model) as found:
        for name in ("red", "blue"):
            put = await found.send("admin", "PUT", f"/v1/collections/{name}", json={})
            assert put.status_code == 200, put.text
        document = {"id": "plan.md", "collection": "red", "text": SECRET}
        written = await found.send("admin", "POST", "/v1/documents", json=document)
        assert written.status_code == 200, written.text
        assert (await found.ask("red-ask", "red")).status_code == 200
        yield found


DOCUMENT = "/v1/documents/plan.md?collection=red"
TRIES: list[tuple[str, str, Any]] = [
    ("POST", "/v1/search", {"query": PROMPT, "collection": "red"}),
    ("GET", DOCUMENT, None),
    ("GET", "/v1/documents?collection=red", None),
    ("DELETE", DOCUMENT, None),
    ("POST", "/v1/documents", {"id": "plan.md", "collection": "red", "text": "Planted."}),
    ("POST", "/v1/documents:batch?collection=red", None),
    ("PUT", "/v1/collections/red", {}),
    ("DELETE", "/v1/collections/red", None),
    ("GET", "/v1/backup", None),
    ("POST", "/v1/restore", None),
    ("PUT", "/v1/quality/report", {}),
]


@pytest.mark.parametrize("name", ["blue-ask", "blue-write", "blue-view"])
async def test_a_key_of_another_tenant_reaches_no_document_and_each_try_is_recorded(
    attacked: Platform, name: str
) -> None:
    tries = [
        *TRIES,
        ("POST", "/v1/chat/completions", {
            "messages": [{"role": "user", "content": PROMPT}],
            "ragcache": {"collection": "red"},
        }),
    ]  # fmt: skip
    for method, path, body in tries:
        response = await attacked.send(name, method, path, json=body)
        assert response.status_code == 403, (path, response.text)
        assert "Initech" not in response.text
    kept = await attacked.send("admin", "GET", DOCUMENT)
    assert kept.json()["text"] == SECRET
    for method, _, _ in tries:
        line = await attacked.line(key=name, outcome="forbidden", method=method)
        assert line["tenant"] == "blue"
    recorded = [one for one in attacked.lines() if one.get("key") == name]
    assert len(recorded) == len(tries)
    assert {one["status"] for one in recorded} == {403}


async def test_a_viewer_sees_the_state_without_texts_addresses_and_names_of_other_tenants(
    attacked: Platform,
) -> None:
    (engine,) = attacked.fakes.config.engines
    address = engine.authority

    async def has_asked() -> bool:
        # The gateway infers the engine's cache from prompts, once it knows that it has no feed.
        await attacked.ask("red-ask", "red")
        return "plan.md" in (await attacked.send("admin", "GET", "/v1/cache/tree")).text

    await until(has_asked, "a tree that names the document to an administrator")
    seen = {}
    for path in ("/v1/status", "/v1/cache", "/v1/cache/tree", "/v1/quality", "/v1/collections"):
        response = await attacked.send("blue-view", "GET", path)
        assert response.status_code == 200, response.text
        seen[path] = response.text
        assert "127.0.0.1" not in response.text, path
        assert "Initech" not in response.text
        assert "plan.md" not in response.text, path
        assert (await attacked.send("blue-ask", "GET", path)).status_code == 403
    tree = json.loads(seen["/v1/cache/tree"])
    assert tree["nodes"]
    assert {one["key"] for one in tree["nodes"]} == {""}
    status = (await attacked.send("admin", "GET", "/v1/status")).json()
    [shown] = status["parts"]["engine"]["endpoints"]
    assert shown["address"] == address
    [named] = json.loads(seen["/v1/status"])["parts"]["engine"]["endpoints"]
    assert named["address"] == named["name"] == shown["name"]


async def test_questions_explanations_and_errors_show_no_address_but_to_an_administrator(
    attacked: Platform,
) -> None:
    (engine,) = attacked.fakes.config.engines
    for name, shows in (("red-ask", False), ("admin", True)):
        answer = await attacked.ask(name, "red", explain=True)
        assert answer.status_code == 200, answer.text
        explained = answer.json()["ragcache"]["explanation"]
        assert (explained["engine"] == engine.authority) is shows
        again = await attacked.send(name, "GET", f"/v1/requests/{answer.json()['id']}")
        assert (engine.authority in again.text) is shows
        body = {
            "messages": [{"role": "user", "content": PROMPT}],
            "stream": True,
            "ragcache": {"collection": "red", "events": True},
        }
        staged = await attacked.send(name, "POST", "/v1/chat/completions", json=body)
        assert '"stage":"engine"' in staged.text
        assert ("127.0.0.1" in staged.text) is shows
    attacked.fakes.engine.refuse = (500, {"error": f"backend http://{engine.authority} failed"})
    for name, shows in (("red-ask", False), ("admin", True)):
        failed = await attacked.ask(name, "red")
        assert failed.status_code == 503, failed.text
        assert ("127.0.0.1" in failed.text) is shows, failed.text


async def test_failed_keys_are_in_the_log_by_a_part_of_their_digest(attacked: Platform) -> None:
    wrong = key("guessed")
    refused = await attacked.client.get(
        "/v1/documents/plan.md", headers={"Authorization": f"Bearer {wrong}"}
    )
    assert refused.status_code == 401
    line = await attacked.line(outcome="unknown_key", object="/v1/documents/plan.md")
    assert line["address"] == "127.0.0.1"
    assert line["request_id"] == refused.headers["x-request-id"]
    assert "key" not in line
    assert len(line["key_digest"]) == 8
    assert wrong not in attacked.audit.read_text()
    await attacked.client.get("/v1/backup")
    without = await attacked.line(outcome="unknown_key", action="backup")
    assert "key_digest" not in without


async def test_a_flood_of_bad_keys_does_not_fill_the_disk(attacked: Platform) -> None:
    before = len(attacked.lines())
    for number in range(500):
        headers = {"Authorization": f"Bearer {key(f'guess-{number}')}"}
        assert (await attacked.client.get("/v1/models", headers=headers)).status_code == 401
    await attacked.send("admin", "GET", DOCUMENT)
    await attacked.line(key="admin", action="document.read")
    assert len(attacked.lines()) - before < 100
    page = (await attacked.client.get("/metrics")).text
    assert 'ragcache_gateway_audit_events_total{outcome="left_out"}' in page


async def test_the_log_tells_who_read_and_changed_what_and_has_no_text(
    attacked: Platform,
) -> None:
    answer = await attacked.ask("red-ask", "red")
    line = await attacked.line(action="answer", object=answer.json()["id"])
    assert (line["key"], line["tenant"], line["collection"]) == ("red-ask", "red", "red")
    assert line["documents"] == [{"collection": "red", "id": "plan.md", "use": "cited"}]
    assert line["outcome"] == "done"
    found = await attacked.send(
        "red-ask", "POST", "/v1/search", json={"query": PROMPT, "collection": "red"}
    )
    line = await attacked.line(action="search", request_id=found.headers["x-request-id"])
    assert line["documents"] == [{"collection": "red", "id": "plan.md"}]
    lines = "".join(
        json.dumps({"id": f"note-{number}", "text": f"Note {number}."}) + "\n"
        for number in range(300)
    )
    batch = await attacked.client.post(
        "/v1/documents:batch?collection=blue",
        content=lines,
        headers={**bearer("blue-write"), "Content-Type": "application/jsonl"},
    )
    assert "batch.summary" in batch.text
    end = await attacked.line(action="document.batch", counts={
        "written": 300, "unchanged": 0, "failed": 0
    })  # fmt: skip
    parts = [one for one in attacked.lines() if one["request_id"] == end["request_id"]]
    named = [document["id"] for one in parts for document in one["documents"]]
    assert sorted(named) == sorted(f"note-{number}" for number in range(300))
    backup = await attacked.send("admin", "GET", "/v1/backup")
    assert backup.status_code == 200
    await attacked.line(action="backup", key="admin", outcome="done")
    deleted = await attacked.send("admin", "DELETE", DOCUMENT)
    # The line of a change is durable before its answer.
    line = attacked.lines()[-1]
    assert line["request_id"] == deleted.headers["x-request-id"]
    assert line["action"] == "document.delete"
    text = attacked.audit.read_text()
    for private in ("Initech", PROMPT, "Note 7"):
        assert private not in text
    numbers = [one["sequence"] for one in attacked.lines()]
    assert numbers == list(range(1, len(numbers) + 1)), "no line is missing"


async def test_no_document_changes_while_the_log_cannot_be_written(
    tmp_path: Path, tiny_model: Path
) -> None:
    """The log is a pipe without a reader, as standard output without its collector."""
    async with platform(tmp_path, tiny_model, AUDIT="stdout") as found:
        fill = {"messages": [{"role": "user", "content": "Where?"}]}
        assert (await found.send("admin", "GET", "/v1/documents")).status_code == 200

        async def is_refused() -> bool:
            for _ in range(100):
                await found.send("admin", "GET", "/v1/documents/none", params={"after": "x" * 99})
            document = {"id": "d", "text": "Late."}
            response = await found.send("admin", "POST", "/v1/documents", json=document)
            return response.status_code == 503 and "audit log" in response.text

        await until(is_refused, "a change that is refused", timeout_s=100)
        page = (await found.client.get("/metrics")).text
        assert "ragcache_gateway_audit_failing 1.0" in page
        answer = await found.send("admin", "POST", "/v1/chat/completions", json=fill)
        assert answer.status_code == 200, "questions go on"
        assert found.process.stdout is not None
        reading = asyncio.create_task(found.process.stdout.read())

        async def is_written() -> bool:
            document = {"id": "d", "text": "In time."}
            response = await found.send("admin", "POST", "/v1/documents", json=document)
            return response.status_code == 200

        await until(is_written, "a change after the pipe is read")
        found.process.send_signal(signal.SIGTERM)
        lines = [json.loads(line) for line in (await reading).splitlines()]
    assert {one["stream"] for one in lines} == {"ragcache.audit"}
    numbers = [one["sequence"] for one in lines]
    assert numbers == list(range(1, len(numbers) + 1)), "no line is missing"


async def test_a_key_file_that_is_emptied_by_mistake_revokes_no_key_and_is_reported(
    attacked: Platform,
) -> None:
    attacked.keys.write_text("# every entry is gone\n")

    async def is_stale() -> bool:
        return "ragcache_gateway_keys_stale 1.0" in (await attacked.client.get("/metrics")).text

    await until(is_stale, "a stale file")
    assert (await attacked.ask("red-ask", "red")).status_code == 200
    attacked.keys.write_text("keys = []\n")

    async def is_refused() -> bool:
        return (await attacked.ask("red-ask", "red")).status_code == 401

    await until(is_refused, "a file that says that it has no keys")
    assert not await is_stale()
