"""Models of the hub. Its library reads its settings when it is imported, so a process asks it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.kit.embedding_models import write_model_files

SCRIPT = """
import sys
from ragcache_core.errors import RagCacheError
from ragcache_retriever.embedding.model_files import download, read_model_files
try:
    print(read_model_files(download(sys.argv[1])).fingerprint)
except RagCacheError as error:
    print(type(error).__name__, error)
"""


class Hub(BaseHTTPRequestHandler):
    """Answers each request with the same error. Real hubs name a missing repository in a header."""

    error: tuple[int, str]

    def do_GET(self) -> None:
        status, code = self.error
        self.send_response(status)
        self.send_header("x-error-code", code)
        self.send_header("content-length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub_url(request: pytest.FixtureRequest) -> Iterator[str]:
    handler = type("Handler", (Hub,), {"error": request.param})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def download(name: str, cache: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, name],
        env={**os.environ, "HF_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("hub_url", "error"),
    [((404, "RepoNotFound"), "InvalidInput"), ((503, ""), "Unavailable")],
    indirect=["hub_url"],
)
def test_only_a_missing_model_is_a_wrong_setting(hub_url: str, error: str, tmp_path: Path) -> None:
    assert download("some/model", tmp_path, HF_ENDPOINT=hub_url).startswith(error)


def test_a_cached_model_needs_no_network(tmp_path: Path) -> None:
    folder = tmp_path / "hub/models--some--model"
    revision = "0" * 40
    model = write_model_files(folder / "snapshots" / revision)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(revision)
    found = download("some/model", tmp_path, HF_HUB_OFFLINE="1")
    assert len(found) == 32
    (model / "config.json").unlink()
    assert "holds no config.json" in download("some/model", tmp_path, HF_HUB_OFFLINE="1")
    assert download("other/model", tmp_path, HF_HUB_OFFLINE="1").startswith("Unavailable")


def test_a_pinned_model_is_that_of_its_commit(tmp_path: Path) -> None:
    folder, pinned, newer = tmp_path / "hub/models--some--model", "1" * 40, "2" * 40
    write_model_files(folder / "snapshots" / pinned)
    changed = write_model_files(folder / "snapshots" / newer)
    (changed / "config_sentence_transformers.json").write_text('{"prompts": {"query": "evil"}}')
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(newer)
    found = {
        name: download(name, tmp_path, HF_HUB_OFFLINE="1")
        for name in ("some/model", f"some/model@{newer}", f"some/model@{pinned}")
    }
    assert found["some/model"] == found[f"some/model@{newer}"]
    assert found["some/model"] != found[f"some/model@{pinned}"]
    unknown = download(f"some/model@{'3' * 40}", tmp_path, HF_HUB_OFFLINE="1")
    assert unknown.startswith("Unavailable")
