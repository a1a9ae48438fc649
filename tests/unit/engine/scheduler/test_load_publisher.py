"""What the scheduler half publishes of the engine's queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from ragcache_core.cluster.pending_work import EngineLoad
from ragcache_core.cluster.sent_requests import SentRequest
from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import Unavailable
from ragcache_core.plan.reuse_plan import Handoff
from ragcache_engine.protocol.messages import LoadOutcome
from ragcache_engine.scheduler.block_reservation import BlockReservation
from ragcache_engine.scheduler.load_publisher import ArrivedRequest, LoadPublisher
from ragcache_engine.telemetry.engine_feed import EngineFeed
from tests.kit.scheduler import BLOCKS, LENGTH, PROFILE, PROMPT, FakeBlockPool, SchedulerHarness

if TYPE_CHECKING:
    from ragcache_engine.vllm_interface.block_events import PrefixCacheEvents

TOKEN_S = 0.001
BLOCK = 16


class Publishing:
    """A publisher of an engine that computes a token in a millisecond."""

    def __init__(self, *, knows_costs: bool = True) -> None:
        self.now, self.feed, self.pool = 0.0, EngineFeed(), FakeBlockPool()
        self.costs = ReuseCosts()
        if knows_costs:
            self.costs.use_profile(PROFILE)
        self.publisher = LoadPublisher(self.costs, self.feed, lambda: self.now)
        self.cached: set[bytes] = set()
        self.publisher.bind(
            BlockReservation(self.pool, BLOCK), cast("PrefixCacheEvents", FakeCache(self.cached))
        )

    def step(self, *progress: tuple[str, int, int], preempted: tuple[str, ...] = ()) -> EngineLoad:
        self.publisher.begin_step(preempted)
        for request_id, computed, scheduled in progress:
            if self.publisher.is_pending(request_id):
                self.publisher.on_progress(request_id, computed, scheduled, None)
        self.publisher.publish()
        return self.feed.load

    def arrive(self, request_id: str, num_tokens: int, **more: object) -> EngineLoad:
        self.publisher.on_arrival(ArrivedRequest(request_id, num_tokens, **more))  # type: ignore[arg-type]
        return self.step()

    @property
    def num_published(self) -> int:
        found = self.feed.load_after(0, "")
        assert found is not None
        return found[0]


class FakeCache:
    block_tokens = BLOCK

    def __init__(self, cached: set[bytes]) -> None:
        self._cached = cached

    def has(self, block_hash: bytes) -> bool:
        return block_hash in self._cached


def sent(number: int, work_s: float = 0.0, *, background: bool = False) -> dict[str, object]:
    return {"ragcache_sent": SentRequest("gateway", number, work_s, background).to_field()}


def test_a_request_without_a_plan_counts_until_it_ends() -> None:
    one = Publishing()
    assert one.arrive("r", 200).pending_s == pytest.approx(0.2)
    assert one.step(("r", 0, 150)).pending_s == pytest.approx(0.2)
    load = one.step(("r", 150, 50))
    assert load.pending_s == pytest.approx(0.05)
    assert (load.num_pending, load.num_decoding) == (1, 0)
    load = one.step(("r", 200, 1))
    assert (load.pending_s, load.num_pending, load.num_decoding) == (0.0, 0, 1)
    one.publisher.on_finished("r")
    assert one.step() == EngineLoad(free_tokens=100 * BLOCK)


def test_what_the_prefix_cache_has_is_not_pending() -> None:
    one = Publishing()
    one.cached |= {b"0", b"1", b"2"}
    hashes = [b"%d" % i for i in range(6)]
    load = one.arrive("r", 100, block_hashes=hashes)
    assert load.pending_s == pytest.approx((100 - 3 * BLOCK) * TOKEN_S)
    one.cached |= set(hashes)
    load = one.arrive("whole", 6 * BLOCK, block_hashes=hashes)
    assert load.pending_s == pytest.approx((101 - 3 * BLOCK) * TOKEN_S)


@pytest.mark.parametrize(("planned_s", "expected_s"), [(0.05, 0.05), (9.0, 0.2), (0.0, 0.2)])
def test_a_gateways_prediction_counts_if_it_is_no_longer_than_computing(
    planned_s: float, expected_s: float
) -> None:
    load = Publishing().arrive("r", 200, params=sent(1, planned_s))
    assert load.pending_s == pytest.approx(expected_s)


def test_an_engine_without_a_profile_believes_its_gateways() -> None:
    one = Publishing(knows_costs=False)
    assert one.arrive("r", 200, params=sent(1, 0.5)).pending_s == 0.5
    assert one.step(("r", 0, 100)).pending_s == 0.5
    assert one.arrive("other", 200).num_pending == 2


def test_accepted_numbers_come_with_the_queue_that_has_the_requests() -> None:
    one = Publishing()
    one.arrive("a", 100, params=sent(1))
    one.publisher.on_arrival(ArrivedRequest("c", 100, sent(3)))
    found = one.feed.load_after(0, "gateway")
    assert found is not None
    assert (found[1].num_pending, 1 in found[2], 3 in found[2]) == (1, True, False)
    one.step()
    found = one.feed.load_after(0, "gateway")
    assert found is not None
    assert (found[1].num_pending, 2 in found[2], 3 in found[2]) == (2, False, True)
    other = one.feed.load_after(0, "other gateway")
    assert other is not None
    assert other[2].last == 0


def test_of_the_background_a_question_waits_for_the_running_pass() -> None:
    one = Publishing()
    load = one.arrive("guess", 1000, params=sent(1, background=True))
    assert (load.pending_s, load.num_background) == (0.0, 1)
    load = one.step(("guess", 0, 300))
    assert (load.pending_s, load.background_s) == (pytest.approx(0.3), pytest.approx(0.7))
    load = one.step()  # another request has taken its turn
    assert (load.pending_s, load.background_s) == (0.0, pytest.approx(1.0))


def test_a_preempted_request_is_pending_again() -> None:
    one = Publishing()
    one.arrive("r", 200)
    assert one.step(("r", 200, 1)).num_decoding == 1
    load = one.step(preempted=("r", "unknown"))
    assert (load.num_decoding, load.pending_s) == (0, pytest.approx(0.2))
    assert one.step(("r", 100, 100)).pending_s == pytest.approx(0.1)


def test_nothing_is_published_while_nothing_changes() -> None:
    one = Publishing()
    one.arrive("r", 200)
    one.step(("r", 200, 1))
    before = one.num_published
    for computed in range(201, 240):
        one.step(("r", computed, 1))
    assert one.num_published == before
    del one.pool.free[:5]  # less than a 64th of all blocks
    assert one.step().free_tokens == 100 * BLOCK
    del one.pool.free[:5]
    assert one.step().free_tokens == 90 * BLOCK


def test_metrics_get_what_was_published() -> None:
    one = Publishing()
    one.publisher.take_changes()
    assert one.publisher.take_changes() == {}
    one.arrive("r", 200)
    one.arrive("guess", 100, params=sent(1, background=True))
    one.step(("r", 200, 1))
    expected = {"question": 0.0, "background": pytest.approx(0.1), "decoding": 1}
    assert one.publisher.take_changes() == expected


def test_an_error_does_not_reach_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Publishing()
    monkeypatch.setattr(one.costs, "predict_compute_s", None)
    one.publisher.on_arrival(ArrivedRequest("r", 10))
    one.publisher.on_progress("unknown", 1, 1, None)
    monkeypatch.undo()
    assert one.arrive("r", 10, params=[1]).num_pending == 1


def test_a_request_that_waits_for_another_engine_is_no_pending_work() -> None:
    decoder = SchedulerHarness()
    decoder.costs.use_profile(PROFILE)
    decoder.arrive("r", handoff=Handoff.DECODE)
    assert decoder.scheduler.loadable_tokens("r", 0) is None
    decoder.scheduler.step([], lambda _: BLOCKS)
    load = decoder.feed.load
    assert (load.pending_s, load.num_pending) == (0.0, 1)
    decoder.store.outage = Unavailable("cachestore", "gone")
    assert decoder.loaded("r") == 0
    decoder.scheduler.step([], lambda _: BLOCKS)
    assert decoder.feed.load.pending_s == pytest.approx(LENGTH * TOKEN_S, rel=0.1)


def test_the_scheduler_half_tells_the_phases_of_a_request(engine: SchedulerHarness) -> None:
    engine.costs.use_profile(PrefillProfile((0,), (1, 1000), ((TOKEN_S, 1.0),), 2048))
    engine.arrive("first")
    engine.loaded("first")
    engine.prefill("first", pieces=2)
    assert engine.feed.load.pending_s == pytest.approx(LENGTH // 2 * TOKEN_S, abs=TOKEN_S)
    engine.scheduler.on_finished("first", BLOCKS)
    engine.scheduler.step([], lambda _: BLOCKS)
    assert engine.feed.load == EngineLoad()

    for _ in range(20):  # how fast the store is has to be measured
        engine.costs.observe_load({"memory": 4096}, 0.004)
    engine.arrive("again", sent=SentRequest("gateway", 1, 0.06))
    engine.scheduler.step([], lambda _: BLOCKS)
    assert engine.feed.load.pending_s == 0.06
    loaded = engine.loaded("again")
    assert loaded == PROMPT.chunk_ends[-1]
    engine.scheduler.step([], lambda _: BLOCKS)
    load = engine.feed.load
    assert load.num_pending == 1
    assert 0 < load.pending_s < 0.06
    outcome = LoadOutcome("again", loaded, 4096, 0.01, None, "")
    engine.scheduler.on_outcomes([outcome])
    engine.scheduler.on_allocated("again", BLOCKS, 0)
    engine.scheduler.step([("again", loaded, LENGTH - loaded)], lambda _: BLOCKS)
    assert engine.feed.load.pending_s == pytest.approx((LENGTH - loaded) * TOKEN_S)
    engine.scheduler.step([("again", LENGTH, 1)], lambda _: BLOCKS)
    assert engine.feed.load == EngineLoad(num_decoding=1)
