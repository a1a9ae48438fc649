"""Fixtures of the gateway's tests. A module may have a gateway of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from harness.browser import Page, console_page, screenshots_folder
from tests.kit.gateway import World, world


@pytest.fixture
async def gateway(tiny_model: Path) -> AsyncGenerator[World, None]:
    async with world(tiny_model) as running:
        yield running


@pytest.fixture
async def page(gateway: World, tmp_path: Path) -> AsyncGenerator[Page, None]:
    """The console of the module's gateway in a browser."""
    async with console_page(gateway.base_url, tmp_path / "profile") as opened:
        yield opened


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    """Folder for the test's screenshots."""
    return screenshots_folder(tmp_path / "screenshots")
