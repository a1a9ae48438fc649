"""The gateway's planner follows cached KV, queues and what engines report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from ragcache_core.cluster.pending_work import EngineLoad
from ragcache_core.cost.engine_costs import EngineCosts
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.identity.keys import KEY_BYTES, KVSpace, VariantKey
from ragcache_core.knowledge.node_change import StoredNode
from ragcache_core.planner.document_order import RankedDocument
from ragcache_core.planner.request_plan import EngineRole, PlannedPrompt, RequestPlan
from ragcache_core.scheduling.decode_pace import DecodePace
from ragcache_core.scheduling.priority import QueuePosition
from ragcache_gateway.engines.client import Engine
from ragcache_gateway.engines.engine_load import EngineLoads
from ragcache_gateway.planning.cache_view import CacheView
from ragcache_gateway.planning.request_planner import Order, PrefilledChunks, RequestPlanner
from ragcache_gateway.prompts.reuse_mode import ReuseMode
from ragcache_gateway.telemetry.metrics import Metrics
from ragcache_wire.settings import GatewaySettings
from tests.kit.stored_prefix import stored_prefix

SPACE = KVSpace("model", num_layers=2, num_kv_heads=1, head_dim=8, dtype="bfloat16")
HEAD, A, B = (bytes([n]) * KEY_BYTES for n in range(3))
EXACT = ReuseMode("exact", 0.2)
PROFILE = PrefillProfile((0, 1000), (1, 1000), ((0.001, 1.0), (0.001, 1.0)), 1000)


@dataclass(eq=False)
class OneEngine:
    address: str
    in_flight: int = 0
    role: EngineRole = "both"
    failure: str | None = None
    records: str | None = "records:2"
    load: EngineLoad = field(default_factory=EngineLoad)
    pace: DecodePace = field(default_factory=DecodePace)

    def as_engine(self) -> Engine:
        return cast("Engine", self)


@dataclass
class Pool:
    known: list[OneEngine]

    @property
    def healthy(self) -> list[OneEngine]:
        return [one for one in self.known if one.failure is None]

    def last_chosen(self, engine: OneEngine) -> int:
        return 0


@dataclass
class Loads:
    engines: Pool
    known: EngineCosts | None = field(default_factory=lambda: EngineCosts(PROFILE))

    def costs(self, engine: OneEngine) -> EngineCosts | None:
        return self.known

    def load(self, engine: OneEngine) -> EngineLoad:
        return engine.load

    def queue_s(self, engine: OneEngine, position: QueuePosition | None = None) -> float:
        return engine.load.pending_s


class World:
    """A planner over two engines, with a clock that a test moves."""

    def __init__(self, **settings: object) -> None:
        self.one, self.two = OneEngine("one:1"), OneEngine("two:1")
        self.now = 0.0
        self.loads = Loads(Pool([self.one, self.two]))
        required = GatewaySettings.model_construct(
            order="cached",
            max_displacement=None,
            signing_key_file=None,
            view_max_nodes=1000,
            engine_cache_tokens=1000,
            engine_watch_s=1,
        )
        self.feeds: dict[str, str | None] = {"one:1": None, "two:1": None}
        self.view = CacheView(lambda: self.feeds, tuple, required, Metrics())
        self.view.update()
        self.planner = RequestPlanner(
            required.model_copy(update=settings),
            SPACE,
            cast("EngineLoads", self.loads),
            self.view,
            lambda: self.now,
        )

    def plan(
        self,
        *prefilled: PrefilledChunks,
        order: Order | None = None,
        reuse: ReuseMode = EXACT,
        is_trial: bool = False,
    ) -> RequestPlan:
        return self.planner.plan(
            self.prompt(), reuse, order, is_trial=is_trial, prefilled=prefilled
        )

    def prompt(self) -> PlannedPrompt:
        documents = [RankedDocument((one,), (200,)) for one in (A, B)]
        return PlannedPrompt((HEAD,), (150,), documents, 20)

    def compute(self, engine: OneEngine, *order: int) -> RequestPlan:
        """Have an engine compute both documents in an order."""
        documents = [RankedDocument((one,), (200,)) for one in [(A, B)[rank] for rank in order]]
        prompt = PlannedPrompt((HEAD,), (150,), documents, 20)
        plan = self.planner.plan(prompt, EXACT, "rank", is_trial=False)
        self.planner.computed(engine.as_engine(), plan, blends=False)
        return plan


@pytest.mark.parametrize("known", [EngineCosts(PROFILE), None])
def test_a_question_goes_to_the_engine_that_computed_its_documents(
    known: EngineCosts | None,
) -> None:
    world = World()
    world.loads.known = known
    world.compute(world.two, 1, 0)
    plan = world.plan()
    assert plan.order == (1, 0)
    assert world.planner.engine_of(plan) is world.two


def test_a_request_may_keep_the_ranks() -> None:
    world = World()
    world.compute(world.one, 1, 0)
    assert world.plan(order="rank").order == (0, 1)
    assert world.plan(is_trial=True).order == (0, 1)
    assert world.plan(reuse=ReuseMode("off", 0.2)).order == (0, 1)


def test_a_request_may_ask_for_the_cached_order() -> None:
    world = World(order="rank")
    world.compute(world.one, 1, 0)
    assert world.plan().order == (0, 1)
    assert world.plan(order="cached").order == (1, 0)


def test_the_limit_on_moves_holds() -> None:
    world = World(max_displacement=0)
    world.compute(world.one, 1, 0)
    assert world.plan().order == (0, 1)


def test_the_queue_of_an_engine_counts() -> None:
    world = World()
    world.compute(world.one, 0, 1)
    assert world.planner.engine_of(world.plan()) is world.one
    world.one.load = EngineLoad(pending_s=9.0, num_decoding=3, free_tokens=4096)
    assert world.planner.engine_of(world.plan()) is world.two
    world.one.load = EngineLoad(background_s=9.0, num_background=1)
    assert world.planner.engine_of(world.plan()) is world.one


def test_engines_with_roles_answer_together() -> None:
    world = World(slo_next_token_ms=50)
    world.one.role, world.two.role = "prefill", "decode"
    # It has no room for one more answer, but no engine that answers has.
    world.two.load = EngineLoad(num_decoding=4, free_tokens=4096)
    for number in range(1, 9):
        world.two.pace.observe(number, float(number), 1.0)
    plan = world.plan()
    assert world.planner.prefill_engine_of(plan) is world.one
    assert world.planner.engine_of(plan) is world.two
    prefilled = PrefilledChunks(world.one.as_engine(), (HEAD,), is_confirmed=True)
    assert world.planner.engine_of(world.plan(prefilled)) is world.two
    world.two.failure = "it does not answer"
    assert world.planner.engine_of(world.plan()) is world.one


def test_an_observed_hit_contradicts_the_prediction() -> None:
    world = World()
    world.compute(world.one, 1, 0)
    world.now = 5.0
    other = world.compute(world.one, 0, 1)
    # The engine had nothing, not even the head: it must have evicted the first order.
    world.planner.observe_hit(world.one.as_engine(), other, 0, sent_s=5.0)
    assert world.plan().order == (0, 1)


def test_an_engine_that_has_failed_is_not_planned_for() -> None:
    world = World()
    world.compute(world.one, 1, 0)
    world.one.failure = "it does not answer"
    assert world.planner.engine_of(world.plan()) is world.two


def test_a_source_that_is_not_current_is_not_used() -> None:
    world = World()
    parent = None
    for chunk in (HEAD, B, A):
        key = VariantKey(chunk, chunk)
        node = StoredNode(key, parent, 200, 100, exact=True, cost_s=0.1)
        # No feed of this shard is synchronized.
        world.view.tree.store("store:shard:1", "memory", node)
        parent = key
    assert world.plan().order == (0, 1)
    assert {decision.action.value for decision in world.plan().decisions} == {"compute"}


def test_an_engine_that_has_left_is_not_preferred() -> None:
    world = World()
    plan = RequestPlan((), "engine:gone:1")
    assert world.planner.engine_of(plan) is None


def test_the_engine_is_chosen_again_for_the_order_of_the_plan() -> None:
    world = World()
    world.compute(world.one, 1, 0)
    plan, prompt = world.plan(), world.prompt()
    renewed = world.planner.renew(plan, prompt, EXACT)
    assert (renewed.order, renewed.source) == ((1, 0), plan.source)
    assert renewed.runner_up is not None
    assert renewed.runner_up.order == (1, 0)
    world.one.load = EngineLoad(pending_s=9.0)
    renewed = world.planner.renew(plan, prompt, EXACT)
    assert renewed.order == (1, 0)
    assert world.planner.engine_of(renewed) is world.two


def test_what_may_have_been_blended_is_not_predicted() -> None:
    world = World()
    plan = world.plan()
    world.planner.computed(world.one.as_engine(), plan, blends=True)
    assert not stored_prefix(world.view.tree, [HEAD, A, B])
    world.planner.computed(world.one.as_engine(), plan, blends=False)
    assert len(stored_prefix(world.view.tree, [HEAD, A, B])) == 3


def test_the_engine_of_a_confirmed_guess_is_chosen_unless_it_has_failed() -> None:
    world = World()
    plan = world.compute(world.one, 0, 1)
    confirmed = PrefilledChunks(world.two.as_engine(), (HEAD, A), is_confirmed=True)
    world.two.in_flight = 3
    renewed = world.planner.renew(plan, world.prompt(), EXACT, [confirmed])
    assert world.planner.engine_of(renewed) is world.two
    assert [d.action.value for d in renewed.decisions] == ["cached", "cached", "compute"]
    world.two.failure = "it does not answer"
    renewed = world.planner.renew(plan, world.prompt(), EXACT, [confirmed])
    assert world.planner.engine_of(renewed) is world.one


def test_what_a_wrong_guess_has_computed_counts_and_decides_nothing_by_itself() -> None:
    world = World()
    prefilled = PrefilledChunks(world.two.as_engine(), (HEAD, A))
    assert world.planner.engine_of(world.plan(prefilled)) is world.two
    world.compute(world.one, 0, 1)
    assert world.planner.engine_of(world.plan(prefilled)) is world.one


def test_a_guess_of_the_question_itself_does_not_make_its_engine_busy() -> None:
    world = World()
    world.two.in_flight = 1
    # It has computed nothing yet, so only the requests in flight differ.
    running = PrefilledChunks(world.two.as_engine(), (), is_running=True)
    assert world.planner.engine_of(world.plan(running)) is world.one
    world.one.in_flight = 1
    assert world.planner.engine_of(world.plan(running)) is world.two
    assert world.planner.engine_of(world.plan()) is world.one


def test_one_engine_is_planned_with_what_it_has_computed_ahead() -> None:
    world = World()
    world.two.failure = "it does not answer"
    prefilled = PrefilledChunks(world.one.as_engine(), (HEAD, A, B), is_confirmed=True)
    renewed = world.planner.renew(world.plan(), world.prompt(), EXACT, [prefilled])
    assert renewed.reused_tokens == 550


def test_a_computed_guess_is_predicted_and_is_no_use_of_its_chunks() -> None:
    world = World()
    plan = world.plan()
    world.planner.record_prefilled(world.one.as_engine(), plan)
    nodes = stored_prefix(world.view.tree, [HEAD, A, B])
    before = [world.view.tree.frequency(node, world.now) for node in nodes]
    assert len(before) == 3
    world.planner.record_prefilled(world.one.as_engine(), plan)
    assert [world.view.tree.frequency(node, world.now) for node in nodes] == before
    world.planner.computed(world.one.as_engine(), plan, blends=False)
    assert all(world.view.tree.frequency(node, world.now) > 1 for node in nodes)
