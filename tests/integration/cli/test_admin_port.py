"""The commands and the console through a forwarded admin port, as ``kubectl port-forward`` does.

The gateway has the two ports and the key of a cluster. A relay on loopback takes the place of
kubectl, and passes bytes on as it does.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from harness.browser import (
    begin_to_ask,
    console_page,
    fill,
    needs_chromium,
    select_tab,
    submit,
    texts,
    until_answered,
)
from harness.processes import free_port
from ragcache_cli.main import app
from tests.kit.connection import CuttableConnection
from tests.kit.gateway import World, key, world, write_admin_key

ADMIN_KEY = key("admin")


@pytest.fixture
async def gateway(tiny_model: Path, tmp_path: Path) -> AsyncGenerator[World, None]:
    keys = write_admin_key(tmp_path / "keys.toml")
    admin_listen = f"127.0.0.1:{free_port()}"
    async with world(tiny_model, api_keys_file=keys, admin_listen=admin_listen) as running:
        yield running


@pytest.fixture
async def forwarded(
    gateway: World, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[CuttableConnection, None]:
    """The admin port, forwarded to another port of loopback, and the key as the pages set it."""
    monkeypatch.setenv("RAGCACHE_API_KEY", ADMIN_KEY)
    async with CuttableConnection.to(f"http://{gateway.config.admin_listen}") as relay:
        yield relay


async def ragcache(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(words))


async def test_ask_explain_and_top_work_with_the_key(
    forwarded: CuttableConnection, tmp_path: Path
) -> None:
    target = ("--gateway", forwarded.url)
    (tmp_path / "billing.md").write_text("# Billing\n\nIt runs in eu-north.\n")
    ingested = await ragcache("ingest", str(tmp_path / "billing.md"), *target)
    assert ingested.exit_code == 0, ingested.output
    asked = await ragcache("ask", "Where does billing run?", *target)
    assert asked.exit_code == 0, asked.output
    [request] = re.findall(r"ragcache explain (\S+)", asked.stdout)
    explained = await ragcache("explain", request, "--output", "json", *target)
    assert explained.exit_code == 0, explained.output
    assert json.loads(explained.stdout)["id"] == request
    top = await ragcache("top", "--once", "--interval", "0.1", "--output", "json", *target)
    assert (top.exit_code, top.stderr) == (0, "")
    frame = json.loads(top.stdout)
    assert frame["status"] == {"answering": True, "problem": None}
    [engine] = frame["engines"]
    assert engine["ready"]
    # The key may read what needs the scope admin.
    assert frame["cache"]["tiers"].keys() == {"memory", "disk"}
    assert frame["ingest"]["chunks"] is not None
    assert frame["requests"]["per_s"] > 0


async def test_without_the_key_top_names_its_variable(
    forwarded: CuttableConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAGCACHE_API_KEY")
    refused = await ragcache("top", "--once", "--gateway", forwarded.url)
    assert refused.exit_code == 2
    assert "RAGCACHE_API_KEY" in refused.stderr


@pytest.mark.usefixtures("forwarded")
async def test_on_the_first_port_top_names_the_admin_port(gateway: World) -> None:
    refused = await ragcache("top", "--once", "--gateway", gateway.base_url)
    assert refused.exit_code == 2
    assert "spec.gateway.adminPort" in refused.stderr


@needs_chromium
async def test_the_console_works_with_the_key(
    forwarded: CuttableConnection, tmp_path: Path
) -> None:
    async with console_page(forwarded.url, tmp_path / "profile") as page:
        await begin_to_ask(page)
        await page.until("document.querySelector('#ask-answer .error') !== null")
        [error] = await texts(page, "#ask-answer .error")
        assert error == "The gateway needs an API key: enter it at the top of the page."
        page.errors.clear()  # the browser counts the status 401 as one
        await fill(page, "key", ADMIN_KEY)
        await submit(page, "key-form")
        await begin_to_ask(page)
        await until_answered(page)
        assert await texts(page, "#ask-state") == ["The answer is complete."]
        assert await texts(page, ".parts tbody tr") != []
        await select_tab(page, "platform")
        await page.until("document.querySelectorAll('#panel-platform table').length === 5")
        assert page.errors == []
