"""Fixtures of the CLI's tests. A module may have another platform."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.kit.gateway import World, world


@pytest.fixture
async def platform(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[World, None]:
    """A gateway between fakes, which the commands call."""
    async with world(tiny_model) as running:
        monkeypatch.setenv("RAGCACHE_GATEWAY", running.base_url)
        yield running
