"""Which nodes are told, over vLLM's own block pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ragcache_core.identity.keys import VariantKey
from ragcache_core.knowledge.resident_nodes import ResidentNodes
from ragcache_core.plan.prompt import Prompt, assemble, plan_exact
from ragcache_core.plan.segments import checked_segments
from ragcache_engine.protocol.messages import TierChange
from ragcache_engine.vllm_interface.block_salting import salt_block_hashes
from ragcache_kv.values.layout import value_bytes
from tests.kit.scheduler import SPACE

if TYPE_CHECKING:
    from tests.integration.engine.announced_pool import AnnouncedPool

NUM_BLOCKS = 12
PROMPT = assemble(range(6), [range(10, 19), range(20, 23), range(30, 37)], range(90, 93))
"""Segments end at 6, 15, 18 and 25: after 1, 3, 4 and 6 full blocks."""
OTHER = assemble(range(6), [range(40, 50)], range(90, 93))


def nodes(prompt: Prompt = PROMPT, domain: str = "public") -> list[VariantKey]:
    plan = plan_exact(prompt, SPACE, domain, "probe")
    return [named.variant for named in checked_segments(plan, prompt.token_ids, SPACE)]


@pytest.fixture
def engine() -> AnnouncedPool:
    from tests.integration.engine.announced_pool import AnnouncedPool

    return AnnouncedPool(NUM_BLOCKS, PROMPT)


def test_a_node_is_told_with_its_parent_its_size_and_its_cost(engine: AnnouncedPool) -> None:
    engine.cache(engine.arrive("r"))
    engine.step()
    assert engine.tiers == dict.fromkeys(nodes(), "device")
    told = [change.node for batch in engine.feed.node_batches() for change in batch]
    found = {node.key: node for node in told if node is not None}
    ordered = [found[key] for key in nodes()]
    assert [node.parent for node in ordered] == [None, *nodes()[:-1]]
    assert [node.num_tokens for node in ordered] == [6, 9, 3, 7]
    assert [node.num_bytes for node in ordered] == [value_bytes(SPACE, n) for n in (6, 9, 3, 7)]
    assert [node.cost_s for node in ordered] == pytest.approx([6e-3, 9e-3, 3e-3, 7e-3])


def test_an_evicted_block_drops_its_node_and_those_below_it(engine: AnnouncedPool) -> None:
    blocks = engine.cache(engine.arrive("r"))
    engine.step()
    engine.pool.evict_blocks({blocks[3].block_id})
    engine.step()
    assert list(engine.tiers) == nodes()[:2]
    engine.pool.evict_blocks({blocks[0].block_id})
    engine.step()
    assert engine.tiers == {}


def test_a_copy_of_an_evicted_block_keeps_its_node(engine: AnnouncedPool) -> None:
    request = engine.arrive("r", OTHER)
    first, second = engine.cache(request), engine.cache(request)
    engine.step()
    engine.pool.evict_blocks({block.block_id for block in first})
    engine.step()
    assert engine.tiers == dict.fromkeys(nodes(OTHER), "device")
    engine.pool.evict_blocks({second[0].block_id})
    engine.step()
    assert engine.tiers == {}


def test_blocks_that_were_cached_before_a_plan_named_them_are_told(engine: AnnouncedPool) -> None:
    request = engine.arrive("r")
    engine.cache(request)
    engine.announcer.end("r")
    engine.step()
    assert engine.tiers == {}, "nothing was told before the request ended"
    engine.arrive("again")
    engine.step()
    assert engine.tiers == dict.fromkeys(nodes(), "device")


def test_prompts_share_the_nodes_before_they_differ(engine: AnnouncedPool) -> None:
    engine.cache(engine.arrive("r"))
    engine.arrive("other", OTHER)
    engine.step()
    assert nodes()[0] == nodes(OTHER)[0]
    assert set(engine.tiers) == set(nodes())


def test_a_cleared_cache_drops_every_node(engine: AnnouncedPool) -> None:
    request = engine.arrive("r")
    engine.pool.free_blocks(engine.cache(request))
    engine.step()
    assert engine.pool.reset_prefix_cache()
    engine.step()
    assert engine.tiers == {}
    engine.cache(request)
    engine.step()
    assert set(engine.tiers) == set(nodes())


def test_salted_blocks_are_not_told(engine: AnnouncedPool) -> None:
    request = engine.arrive("blend")
    salt_block_hashes(request, 3)
    engine.pool.free_blocks(engine.cache(request))
    engine.step()
    assert list(engine.tiers) == nodes()[:2], "what precedes the first block that is not exact"
    engine.pool.evict_blocks(set(range(1, NUM_BLOCKS)))
    engine.cache(engine.arrive("trial", salt="trial"))
    engine.step()
    assert engine.tiers == {}


def test_a_tenants_blocks_are_told_under_the_salt_of_its_domain(engine: AnnouncedPool) -> None:
    engine.cache(engine.arrive("r", domain="tenant:a", salt="tenant:a"))
    engine.step()
    assert set(engine.tiers) == set(nodes(domain="tenant:a"))


def test_the_workers_tiers_are_told_while_no_block_is_cached(engine: AnnouncedPool) -> None:
    blocks = engine.cache(engine.arrive("r"))
    first, second = nodes()[:2]
    engine.announcer.on_tier_changes(
        {first: TierChange("host", exact=True), second: TierChange("host", exact=False)}
    )
    engine.step()
    assert engine.tiers == dict.fromkeys(nodes(), "device")
    engine.pool.evict_blocks({blocks[0].block_id})
    engine.announcer.end("r")
    engine.step()
    assert engine.tiers == {first: "host", second: "host"}
    told = {c.key: c.node for batch in engine.feed.node_batches() for c in batch if c.node}
    assert (told[first].exact, told[second].exact) == (True, False)
    engine.announcer.on_tier_changes({first: None, second: None})
    engine.step()
    assert engine.tiers == {}


def test_nothing_is_kept_of_what_is_neither_cached_nor_running(engine: AnnouncedPool) -> None:
    for number in range(50):
        prompt = assemble(range(6), [range(100 * number + 10, 100 * number + 20)], range(3))
        request_id = f"r{number}"
        engine.pool.free_blocks(reversed(engine.cache(engine.arrive(request_id, prompt))))
        engine.step()
        engine.announcer.end(request_id)
    announcer = engine.announcer
    assert len(announcer._nodes) <= NUM_BLOCKS
    assert len(announcer._hashes) <= NUM_BLOCKS
    assert not announcer._prompts
    announcer._nodes.check()


def test_events_that_a_user_has_turned_on_are_still_published() -> None:
    from tests.integration.engine.announced_pool import events_of, make_block_pool

    pool = make_block_pool(NUM_BLOCKS, enable_kv_cache_events=True)
    seen: list[list[object] | None] = []
    events_of(pool).follow(lambda names: seen.append(None if names is None else list(names)))
    pool.reset_prefix_cache()
    assert len(pool.take_events()) == 1
    assert None in seen


def test_no_error_reaches_vllm(engine: AnnouncedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.cache(engine.arrive("one"))

    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    for method in ("set_cached", "set_host", "unpin"):
        monkeypatch.setattr(ResidentNodes, method, fail)
    engine.step()
    engine.announcer.on_tier_changes(dict.fromkeys(nodes()))
    engine.announcer.end("one")
