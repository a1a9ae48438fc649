"""The limit of requests at once remembers refusals of a bounded number of callers."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from ragcache_core.access.caller import Caller, Scope
from ragcache_core.scheduling.admission import RefusalCode
from ragcache_gateway.admission.refusal import Refused
from ragcache_gateway.http.middleware import concurrency_limit
from ragcache_gateway.http.middleware.key_check import CALLER


async def test_users_of_an_issuer_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency_limit, "MAX_PACES", 2)
    pools = MagicMock()
    pools.of.return_value.check.side_effect = Refused(RefusalCode.POOL_FULL, "busy", 1.0)
    limit = concurrency_limit.ConcurrencyLimit(AsyncMock(), pools, MagicMock(), MagicMock())
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    for name in ("red", "blue", "red", "green"):
        state = {CALLER: Caller(name, scopes=frozenset({Scope.ASK}))}
        scope = {"type": "http", "path": "/v1/search", "method": "POST", "state": state}
        await limit(scope, AsyncMock(), send)
    assert [one["status"] for one in sent if "status" in one] == [429] * 4
    assert list(limit._paces) == ["red", "green"], "the one that was refused longest ago is gone"
