"""What an engine has in its own caches stays hot in a real store."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from ragcache_core.cost.load_or_compute import ReuseCosts
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Precision, Provenance, VariantInfo
from ragcache_core.plan.prompt import plan_exact
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import LookupKey
from ragcache_engine.protocol.context import EngineContext
from ragcache_engine.scheduler.request import NewRequest
from ragcache_engine.scheduler.scheduler import ConnectorScheduler
from ragcache_engine.telemetry.request_records import RequestRecords
from ragcache_engine.use_reporter import COMPUTED, PREFIX_CACHE
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_wire.settings import EngineSettings
from ragcache_wire.watched.members import FixedMembers
from tests.kit.scheduler import BLOCKS, LENGTH, PROMPT, SPACE
from tests.kit.store import TIMEOUT_S, ServedStore, serving, value, variant, whole
from tests.kit.wait import wait_until

PAGE = 64 << 10
PLAN = plan_exact(PROMPT, SPACE, "public", "r")
SEGMENTS = checked_segments(PLAN, PROMPT.token_ids, SPACE)


def settings_for(served: ServedStore, min_load_tokens: int) -> EngineSettings:
    return EngineSettings(
        cachestore=FixedMembers((served.address,)),
        lookup_wait_s=TIMEOUT_S,
        lookup_deadline_s=TIMEOUT_S,
        min_load_tokens=min_load_tokens,
    )


def put(served: ServedStore, key: VariantKey, num_tokens: int) -> None:
    raw = value(PAGE)
    info = VariantInfo(num_tokens, PAGE, 0, Provenance(exact=True), Precision())
    new = replace(variant(key, raw), info=info)
    served.client.put(new, whole(new, raw), TIMEOUT_S)
    served.store.mover.writer.flush()


def run(scheduler: ConnectorScheduler, num_local: int) -> None:
    """Run the prompt, of which vLLM's own prefix cache has num_local tokens."""
    scheduler.on_new_request(NewRequest("r", PROMPT.token_ids, {"ragcache": PLAN.encode()}))
    wait_until(lambda: scheduler.loadable_tokens("r", num_local) is not None)
    scheduler.on_allocated("r", BLOCKS, 0)
    scheduler.step([("r", num_local, LENGTH - num_local)], lambda _: BLOCKS)
    scheduler.step([("r", LENGTH, 1)], lambda _: BLOCKS)
    scheduler.on_finished("r", BLOCKS)


def test_a_variant_hit_only_in_vllms_prefix_cache_survives_pressure(tmp_path: Path) -> None:
    hot = [named.variant for named in SEGMENTS]
    cold = [VariantKey(bytes([n]) * 16, bytes(16)) for n in range(1, 5)]
    with serving(tmp_path, policy="lru", memory_bytes=16 * PAGE, disk_bytes=16 * PAGE) as served:
        client = ShardedStore(FixedMembers((served.address,)))
        settings = settings_for(served, min_load_tokens=16)
        scheduler = ConnectorScheduler(
            EngineContext(settings, SPACE), RequestRecords(), client, ReuseCosts()
        )
        for named in SEGMENTS:
            put(served, named.variant, named.segment.end - named.segment.start)
        for key in cold:
            put(served, key, 256)
        run(scheduler, num_local=PROMPT.chunk_ends[-1])
        assert served.store.stats().hits_memory == 0
        assert scheduler.take_counts().uses == {PREFIX_CACHE: len(hot)}
        wait_until(lambda: served.store.stats().reported_uses == len(hot))
        for number in range(100, 109):
            put(served, VariantKey(bytes([number]) * 16, bytes(16)), 256)
        wants = [LookupKey.for_variant(key) for key in (*hot, *cold)]
        found = [bool(one.stored) for one in served.client.lookup(wants, TIMEOUT_S).variants]
        assert all(found[: len(hot)])
        assert not all(found[len(hot) :])  # which were put later
        scheduler.close()


def test_a_variant_that_is_computed_although_it_is_stored_is_a_use(tmp_path: Path) -> None:
    """For instance if loading it was predicted to be slower."""
    with serving(tmp_path) as served:
        client = ShardedStore(FixedMembers((served.address,)))
        settings = settings_for(served, min_load_tokens=LENGTH)
        scheduler = ConnectorScheduler(
            EngineContext(settings, SPACE), RequestRecords(), client, ReuseCosts()
        )
        for named in SEGMENTS:
            put(served, named.variant, named.segment.end - named.segment.start)
        run(scheduler, num_local=0)
        assert scheduler.take_counts().uses == {COMPUTED: len(SEGMENTS)}
        wait_until(lambda: served.store.stats().reported_uses == len(SEGMENTS))
        scheduler.close()


@pytest.mark.parametrize(
    ("steps", "num_computed"),
    [
        ([SEGMENTS[0].segment.end], 1),
        ([SEGMENTS[0].segment.end, SEGMENTS[2].segment.end - 1], 2),
        ([SEGMENTS[1].segment.end, LENGTH], len(SEGMENTS)),  # an answer of one token
    ],
)
def test_a_request_reports_only_what_it_has_computed_until_it_ends(
    tmp_path: Path, steps: list[int], num_computed: int
) -> None:
    with serving(tmp_path) as served:
        client = ShardedStore(FixedMembers((served.address,)))
        settings = settings_for(served, min_load_tokens=LENGTH)
        scheduler = ConnectorScheduler(
            EngineContext(settings, SPACE), RequestRecords(), client, ReuseCosts()
        )
        for named in SEGMENTS:
            put(served, named.variant, named.segment.end - named.segment.start)
        scheduler.on_new_request(NewRequest("r", PROMPT.token_ids, {"ragcache": PLAN.encode()}))
        wait_until(lambda: scheduler.loadable_tokens("r", 0) is not None)
        scheduler.on_allocated("r", BLOCKS, 0)
        for start, end in pairwise([0, *steps]):
            scheduler.step([("r", start, end - start)], lambda _: BLOCKS)
        scheduler.on_finished("r", BLOCKS)
        assert scheduler.take_counts().uses == {COMPUTED: num_computed}
        scheduler.close()
