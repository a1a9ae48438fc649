"""Every command that needs a gateway says in one line that it does not answer, or wants a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ragcache_cli.main import app
from ragcache_core.documents.backup_file import BackupWriter
from tests.kit.documentation import cli_commands
from tests.kit.sources import Page, serving_web

DEAD = "http://127.0.0.1:9"
ARGUMENTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("ingest",): ("file.md",),
    ("ask",): ("Where?",),
    ("explain",): ("chatcmpl-1",),
    ("quality",): (),
    ("sync",): ("--patience", "0"),
    ("top",): ("--once",),
    ("usage",): (),
    ("erasure",): ("a.md",),
    ("backup",): ("copy.ragcache",),
    ("restore",): ("copy.ragcache", "--yes"),
    ("collection", "list"): (),
    ("collection", "get"): ("docs",),
    ("collection", "put"): ("docs",),
    ("collection", "patch"): ("docs", "--window", "2"),
    ("collection", "delete"): ("docs", "--yes"),
}


def test_the_commands_with_a_gateway_are_known() -> None:
    found = {
        words
        for words, command in cli_commands().items()
        if any("--gateway" in parameter.opts for parameter in command.params)
    }
    assert found == set(ARGUMENTS)


@pytest.mark.parametrize("words", ARGUMENTS, ids=" ".join)
def test_a_dead_gateway_is_one_line(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.md").write_text("# A")
    arguments = [*words, *ARGUMENTS[words], "--gateway", DEAD]
    if words == ("restore",):
        writer = BackupWriter()
        (tmp_path / "copy.ragcache").write_bytes(writer.add(b"copy") + writer.end())
    if words == ("sync",):
        arguments += ["--object", json.dumps(collection())]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    said = result.stdout if words == ("sync",) else result.stderr
    [line] = said.splitlines()
    assert f"nothing answers at {DEAD}" in line
    assert "see `ragcache status`" in line


def collection() -> dict[str, Any]:
    source = {"http": {"url": "http://127.0.0.1:9/a.html"}}
    return {
        "apiVersion": "ragcache.dev/v1alpha1",
        "kind": "RagCollection",
        "metadata": {"name": "docs", "namespace": "team"},
        "spec": {"cacheRef": {"name": "docs"}, "sources": [source]},
    }


def test_a_missing_key_is_asked_for_by_the_name_of_its_option(tmp_path: Path) -> None:
    body = json.dumps({"error": {"message": "Authorization: the API key is missing"}})
    with serving_web(tmp_path) as web:
        web.pages["/v1/collections/docs"] = Page(body.encode(), status=401)
        given = CliRunner().invoke(app, ["collection", "get", "docs", "--gateway", web.url])
    assert given.exit_code != 0
    assert given.stderr.splitlines() == [
        "ragcache: Authorization: the API key is missing; give the key with --api-key or "
        "RAGCACHE_API_KEY"
    ]
