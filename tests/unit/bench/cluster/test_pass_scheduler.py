"""What each pass of a simulated engine computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from bench.support.cluster.block_cache import BlockCache
from bench.support.cluster.engine_times import EngineTimes
from bench.support.cluster.pass_scheduler import EngineRequest, PassScheduler
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_engine.protocol.messages import LoadOutcome
from ragcache_engine.scheduler.scheduler import ConnectorScheduler

BLOCK, PASS_TOKENS = 16, 64
TIMES = EngineTimes(
    PrefillProfile((0, 100), (1, 64), ((0.01, 0.1), (0.02, 0.2)), PASS_TOKENS),
    accept_s=0.0,
    decode_s=0.005,
    decode_token_s=0.001,
    context_token_s=0.0001,
    load_s=0.01,
    load_token_s=0.001,
    block_tokens=BLOCK,
    cache_tokens=40 * BLOCK,
    max_requests=4,
)


class FakeConnector:
    """Loads what it is told to load."""

    def __init__(self) -> None:
        self.loads: dict[str, int | None] = {}
        self.finished: list[str] = []

    def loadable_tokens(self, request_id: str, num_local: int) -> int | None:
        return self.loads.get(request_id, 0)

    def on_allocated(self, request_id: str, blocks: Sequence[int], num_external: int) -> None:
        pass

    def on_finished(self, request_id: str, blocks: Sequence[int]) -> bool:
        self.finished.append(request_id)
        return False


class Harness:
    def __init__(self) -> None:
        self.connector = FakeConnector()
        self.cache = BlockCache(TIMES.cache_tokens, BLOCK)
        self.scheduler = PassScheduler(TIMES, self.cache, cast(ConnectorScheduler, self.connector))

    def add(
        self, name: str, length: int, max_tokens: int = 1, priority: int = 0, start: int = 0
    ) -> EngineRequest:
        token_ids = range(start, start + length)
        hashes = self.cache.hashes(token_ids, None)
        request = EngineRequest(name, token_ids, max_tokens, priority, hashes)
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, tuple[int, int]]:
        """Run one pass. Return tokens before and tokens of it, by request."""
        chosen = self.scheduler.next_pass()
        self.scheduler.end_pass(chosen)
        return {one.id: (before, tokens) for one, before, tokens in chosen.progress}


def test_a_long_prompt_is_computed_in_parts_beside_decodes() -> None:
    harness = Harness()
    harness.add("short", 10, max_tokens=9)
    harness.add("long", 150, start=1000)
    assert harness.step() == {"short": (0, 10), "long": (0, 54)}
    assert harness.step() == {"short": (10, 1), "long": (54, 63)}
    assert harness.step() == {"short": (11, 1), "long": (117, 33)}
    assert harness.step() == {"short": (12, 1)}


def test_what_another_request_computed_is_not_computed_again() -> None:
    harness = Harness()
    harness.add("first", 50)
    harness.step()
    again = harness.add("again", 50)
    assert harness.step() == {"again": (48, 2)}
    assert again.cached == 48


def test_other_requests_go_on_during_a_load() -> None:
    harness = Harness()
    harness.connector.loads = {"loads": 32, "unknown": None}
    loading = harness.add("loads", 60)
    harness.add("unknown", 40, start=2000)
    harness.add("computes", 20, start=1000)
    assert harness.step() == {"computes": (0, 20)}
    harness.scheduler.end_load(loading, LoadOutcome("loads", 32, 0, 0.1, None, ""))
    harness.connector.loads["unknown"] = 0
    assert harness.step() == {"loads": (32, 28), "unknown": (0, 36)}


def test_a_failed_load_is_computed() -> None:
    harness = Harness()
    harness.connector.loads = {"loads": 32}
    loading = harness.add("loads", 60)
    assert harness.step() == {}
    harness.scheduler.end_load(loading, LoadOutcome("loads", 0, 0, 0.1, None, "lost"))
    assert harness.step() == {"loads": (0, 60)}


def test_waiting_requests_begin_by_priority() -> None:
    harness = Harness()
    harness.add("late", 64, priority=1)
    harness.add("soon", 64, priority=0, start=1000)
    assert list(harness.step()) == ["soon"]
    assert list(harness.step()) == ["late"]


def test_a_request_that_was_aborted_gives_its_blocks_back() -> None:
    harness = Harness()
    request = harness.add("gone", 60, max_tokens=50)
    harness.step()
    harness.scheduler.remove(request)
    harness.scheduler.remove(request)
    assert harness.connector.finished == ["gone"]
    assert harness.scheduler.is_idle
    assert harness.cache.get_num_free_blocks() == harness.cache.num_gpu_blocks


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20), st.integers(0, 3)), max_size=12))
def test_every_request_gets_its_tokens(wanted: list[tuple[int, int, int]]) -> None:
    harness = Harness()
    requests = [
        harness.add(str(i), length, max_tokens, start=1000 * document)
        for i, (length, max_tokens, document) in enumerate(wanted)
    ]
    while not harness.scheduler.is_idle:
        progress = harness.step()
        assert progress
        assert len(progress) <= TIMES.max_requests
        assert sum(tokens for _, tokens in progress.values()) <= PASS_TOKENS
    assert [one.generated for one in requests] == [one.max_tokens for one in requests]
    assert harness.cache.get_num_free_blocks() == harness.cache.num_gpu_blocks


def test_a_pass_takes_longer_with_its_tokens_and_its_decodes() -> None:
    assert TIMES.pass_s([], []) == 0.005
    assert TIMES.pass_s([(0, 64)], []) == 0.1
    assert abs(TIMES.pass_s([(0, 64)], [100, 100]) - 0.122) < 1e-9
    assert abs(TIMES.pass_s([], [100]) - 0.016) < 1e-9


def test_times_are_scaled_and_written() -> None:
    slower = EngineTimes.from_json(TIMES.scaled(3.0).to_json())
    assert abs(slower.pass_s([(50, 32)], [10]) - 3 * TIMES.pass_s([(50, 32)], [10])) < 1e-9
    assert slower.cache_tokens == TIMES.cache_tokens
