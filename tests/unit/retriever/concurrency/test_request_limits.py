"""The retriever refuses requests above its limits, and takes them again afterwards."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from ragcache_core.errors import Overloaded
from ragcache_retriever.concurrency.request_limits import RequestLimits


def test_searches_are_counted_while_they_run() -> None:
    limits = RequestLimits(max_searches=2, max_upsert_bytes=1)
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(limits.search())
        with pytest.raises(Overloaded, match="2 searches are running") as refused, limits.search():
            pass
        assert refused.value.retry_after_s > 0
    with limits.search():
        pass


def test_a_search_that_fails_counts_no_longer() -> None:
    limits = RequestLimits(max_searches=1, max_upsert_bytes=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"), limits.search():
            raise ValueError("broken")


def test_upserts_are_bounded_by_their_bytes_and_a_large_one_runs_alone() -> None:
    limits = RequestLimits(max_searches=1, max_upsert_bytes=100)
    with ExitStack() as running:
        for num_bytes in (60, 40):
            running.enter_context(limits.upsert(num_bytes))
        with pytest.raises(Overloaded, match="preparing 100 bytes"), limits.upsert(1):
            pass
    with limits.upsert(1000), pytest.raises(Overloaded), limits.upsert(1):
        pass
