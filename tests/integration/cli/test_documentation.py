"""The documentation's commands that need a gateway, against a real one with fakes behind it."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner, Result

from ragcache_cli.main import app
from ragcache_wire.settings.gateway import EngineAddress, ModelSettings
from tests.kit.documentation import Command, RunBy, all_commands, run_by, write_reader_folder
from tests.kit.gateway import FakeEngine, World, serving, world

_ADDRESS: Final = re.compile(r"\b(?:localhost|127\.0\.0\.1|[a-z]+-gateway):80[89]0\b")
_REQUEST: Final = re.compile(r"chatcmpl-(\.\.\.|ID|1)")


def pages_with(program: str) -> dict[str, list[Command]]:
    """The commands of each page that are run here, in their order."""
    found: dict[str, list[Command]] = {}
    for command in all_commands():
        if command.words[0] != program:
            continue
        if program != "ragcache" or run_by(command.words[1:]) is RunBy.GATEWAY:
            found.setdefault(command.position.partition(":")[0], []).append(command)
    return found


RAGCACHE: Final = pages_with("ragcache")
CURL: Final = pages_with("curl")


@pytest.fixture
async def platform(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[World, None]:
    write_reader_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    async with (
        serving(FakeEngine()) as port,
        world(
            tiny_model,
            model_name="smollm2",
            other_models=(ModelSettings("tinyrag", str(tiny_model), "auto", 1024),),
            engines=(EngineAddress("127.0.0.1", port, model=1),),
        ) as running,
    ):
        monkeypatch.setenv("RAGCACHE_GATEWAY", running.base_url)
        for name in ("handbook", "support"):
            assert (await ragcache("collection", "put", name)).exit_code == 0
        assert (await ragcache("ingest", "handbook")).exit_code == 0
        yield running


async def ragcache(*words: str) -> Result:
    """Run a command in a thread, because the gateway is in this one, and answer its question."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(words), input="y\n")


async def as_run(command: Command, platform: World) -> list[str]:
    """Return a command's words with this gateway and a request of it in place of the reader's."""
    address = platform.base_url.removeprefix("http://")
    words = [_ADDRESS.sub(address, word) for word in command.words[1:]]
    if words[-1] == "...":
        words[-1] = "What is a tombstone?"
    if words[0] == "top" and "--once" not in words:
        words.append("--once")  # it would run until Ctrl-C
    if any(_REQUEST.fullmatch(word) for word in words):
        asked = await ragcache("ask", "What is a tombstone?")
        request = re.findall(r"ragcache explain (\S+)", asked.stdout)[-1]
        words = [_REQUEST.sub(request, word) for word in words]
    return words


@pytest.mark.parametrize("page", RAGCACHE)
async def test_the_commands_of_a_page_run(platform: World, page: str) -> None:
    for command in RAGCACHE[page]:
        words = await as_run(command, platform)
        if words[0] == "backup":  # the page has it for a laptop and for a cluster
            words.append("--force")
        result = await ragcache(*words)
        assert result.exit_code == 0, f"{command}\n{result.output}"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("page", CURL)
async def test_the_requests_of_a_page_are_served(platform: World, page: str) -> None:
    platform.retriever.copy = [b"a copy"]
    assert (await ragcache("backup", "documents.ragcache")).exit_code == 0
    for command in CURL[page]:
        words = await as_run(command, platform)
        process = await asyncio.create_subprocess_exec(
            *("curl", "--fail", "--silent", "--show-error", "--noproxy", "*", *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, f"{shlex.join(words)}\n{output!r}"


def test_every_page_with_such_commands_is_here() -> None:
    assert {"README.md", "docs/cli.md", "docs/ingest.md", "docs/backup.md"} <= set(RAGCACHE)
    assert {"README.md", "docs/ingest.md", "docs/backup.md"} <= set(CURL)
