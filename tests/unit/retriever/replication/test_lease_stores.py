"""Both kinds of Leases are replaced only if they are unchanged since they were read."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import certifi
import pytest

from ragcache_core.cluster.writer_election import WriterLease
from ragcache_core.errors import InvalidInput
from ragcache_retriever.replication.file_lease import FileLease
from ragcache_retriever.replication.kubernetes_lease import KubernetesLease, lease_of, object_of
from ragcache_retriever.replication.lease_store import (
    LeaseConflict,
    LeaseStore,
    LeaseUnavailable,
)

LEASE = WriterLease("a-1", "a:50051", 3, 8.0, 3)
PATH = "/apis/coordination.k8s.io/v1/namespaces/team/leases"


class Leases(ThreadingHTTPServer):
    """Stores one object as the API server does: each write needs the current resource version."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), LeaseHandler)
        self.stored: dict[str, Any] | None = None
        self.version = 0
        self.lock = threading.Lock()


class LeaseHandler(BaseHTTPRequestHandler):
    server: Leases

    def do_GET(self) -> None:
        self._reply()

    def do_POST(self) -> None:
        self._reply()

    def do_PUT(self) -> None:
        self._reply()

    def _reply(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        with self.server.lock:
            status, answer = self._answer(body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self, body: Any) -> tuple[int, Any]:
        if self.headers["authorization"] != "Bearer secret":
            return 401, {"message": "Unauthorized"}
        stored = self.server.stored
        if self.command == "POST":
            if stored is not None:
                return 409, {"message": "already exists"}
        elif self.path != f"{PATH}/writer" or stored is None:
            return 404, {"message": "not found"}
        elif self.command == "GET":
            return 200, stored
        elif body["metadata"]["resourceVersion"] != stored["metadata"]["resourceVersion"]:
            return 409, {"message": "the object has been modified"}
        self.server.version += 1
        body["metadata"]["resourceVersion"] = str(self.server.version)
        self.server.stored = body
        return 200, body

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def api_server() -> Iterator[Leases]:
    server = Leases()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def account(folder: Path) -> Path:
    """Return a folder as the kubelet mounts it, with any valid certificates."""
    folder.mkdir(exist_ok=True)
    (folder / "ca.crt").write_bytes(Path(certifi.where()).read_bytes())
    (folder / "token").write_text("secret\n")
    return folder


@pytest.fixture(params=["file", "kubernetes"])
def store(request: pytest.FixtureRequest, tmp_path: Path, api_server: Leases) -> LeaseStore:
    if request.param == "file":
        return FileLease(tmp_path / "lease.json")
    url = f"http://127.0.0.1:{api_server.server_address[1]}"
    return KubernetesLease(url, "team", "writer", account(tmp_path / "account"))


async def test_a_lease_is_created_read_and_replaced(store: LeaseStore) -> None:
    assert await store.read() is None
    first = await store.write(LEASE)
    assert first.version
    assert replace(first, version="") == LEASE
    assert await store.read() == first
    second = await store.write(replace(first, holder=""))
    assert second.version != first.version
    assert await store.read() == second
    await store.close()


async def test_a_lease_that_has_changed_is_not_replaced(store: LeaseStore) -> None:
    first = await store.write(LEASE)
    with pytest.raises(LeaseConflict):
        await store.write(LEASE)  # it exists already
    await store.write(first)
    with pytest.raises(LeaseConflict):
        await store.write(first)
    await store.close()


async def test_of_many_writers_of_one_version_one_wins(store: LeaseStore) -> None:
    first = await store.write(LEASE)
    results = await asyncio.gather(
        *(store.write(replace(first, holder=f"w{i}")) for i in range(8)), return_exceptions=True
    )
    written = [result for result in results if isinstance(result, WriterLease)]
    assert len(written) == 1
    assert await store.read() == written[0]
    assert all(isinstance(r, LeaseConflict) for r in results if r is not written[0])
    await store.close()


async def test_a_damaged_file_is_no_free_lease(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    path.write_text("{}")
    with pytest.raises(LeaseUnavailable, match="is not a Lease"):
        await FileLease(path).read()
    with pytest.raises(LeaseUnavailable):
        await FileLease(tmp_path / "gone" / "lease.json").write(LEASE)


async def test_a_new_token_is_used_and_a_refusal_is_no_free_lease(
    tmp_path: Path, api_server: Leases
) -> None:
    folder = account(tmp_path / "account")
    store = KubernetesLease(
        f"http://127.0.0.1:{api_server.server_address[1]}", "team", "writer", folder
    )
    (folder / "token").write_text("old")
    with pytest.raises(LeaseUnavailable, match="401: Unauthorized"):
        await store.read()
    (folder / "token").write_text("secret")
    assert await store.read() is None
    await store.close()


async def test_a_server_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    store = KubernetesLease("http://127.0.0.1:1", "team", "writer", account(tmp_path / "account"))
    with pytest.raises(LeaseUnavailable):
        await store.read()
    await store.close()


def test_a_pod_without_a_token_is_misconfigured(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="mount a token"):
        KubernetesLease("https://127.0.0.1", "team", "writer", tmp_path)
    with pytest.raises(InvalidInput, match="this is no pod"):
        KubernetesLease.of_this_pod("team", "writer")


def test_an_object_that_another_client_emptied_is_a_free_lease() -> None:
    made = object_of(LEASE, "team", "writer", datetime(2026, 1, 1, tzinfo=UTC))
    assert made["spec"]["renewTime"] == "2026-01-01T00:00:00.000000Z"
    assert "resourceVersion" not in made["metadata"]
    found = lease_of({"metadata": {"name": "writer", "resourceVersion": "7"}})
    assert found == WriterLease("", "", 0, 0.0, 0, "7")


def test_threads_of_several_replicas_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"

    def win(i: int) -> bool:
        try:
            asyncio.run(FileLease(path).write(replace(LEASE, holder=str(i))))
        except LeaseConflict:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(win, range(8))) == 1
