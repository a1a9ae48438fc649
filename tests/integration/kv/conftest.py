"""Limits that no busy machine reaches. A test about one of them shortens it."""

from __future__ import annotations

import pytest

from tests.kit.store import lengthen_store_limits


@pytest.fixture(autouse=True)
def long_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    lengthen_store_limits(monkeypatch)
