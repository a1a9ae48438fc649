"""Limits that no busy machine reaches. A test about one of them shortens it."""

from __future__ import annotations

import pytest

from ragcache_retriever.ranking.rerankers import RerankEndpoint
from tests.kit.limits import LIMIT_S
from tests.kit.retriever import lengthen_retriever_limits


@pytest.fixture(autouse=True)
def long_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    lengthen_retriever_limits(monkeypatch)
    defaults = RerankEndpoint.__init__.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "deadline_s", LIMIT_S)
