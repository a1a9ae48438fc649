"""Values in an engine's own tiers are served after their store has died."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from harness.processes import start_cachestore
from ragcache_core.identity.variant import Origin
from ragcache_core.store_api import NewVariant
from ragcache_engine.protocol.messages import LoadJob, VariantSpan
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.outgoing_value import ReadyValue
from ragcache_kv.values.stored_value import StoredValue
from ragcache_wire.settings import EngineSettings
from ragcache_wire.watched.members import FixedMembers
from tests.kit.wait import wait_until
from tests.kit.worker import BLOCKS, FakeStoreClient, WorkerHarness, key, spans

WAIT_S = 60.0


def test_a_store_that_dies_between_lookup_and_load_is_not_needed(tmp_path: Path) -> None:
    """The store is killed after the lookup and before the load."""
    store = start_cachestore(tmp_path)
    members = FixedMembers((store.address,))
    config = EngineSettings(cachestore=members, host_tier_bytes=1 << 20)
    client = ShardedStore(members)
    worker = WorkerHarness(config, client=client)
    try:
        wanted = spans(10, 50, 131)
        fake = FakeStoreClient()
        tensors = fake.fill(wanted)
        for span in wanted:
            stored = fake.values[span.variant]
            assert isinstance(stored, StoredValue)
            origin = Origin(domain="tenant")
            sizes = tuple([part.num_bytes for part in stored.parts])
            new = NewVariant(
                *(span.variant, stored.info, origin, stored.shape, sizes, stored.value_format)
            )
            client.put(new, ReadyValue.with_checksums(stored.value, sizes), WAIT_S)
        job = LoadJob("first", wanted, 0, 131, BLOCKS, "tenant")
        assert worker.load(job).values_by_tier == {"store": 3}
        tiers = worker.connector._tiers
        held = False  # a change is reported once

        def are_held() -> bool:
            nonlocal held
            held |= tiers.take_counts().held_bytes != {}
            return held and not tiers._rebalancing

        wait_until(are_held)
        store.service.kill()
        worker.cache.slots_written.clear()
        outcome = worker.load(replace(job, request_id="again"))
        assert (outcome.tokens, outcome.values_by_tier) == (131, {"host": 3})
        for span in wanted:
            read = worker.cache.read(BLOCKS, span.start, span.end)
            assert torch.equal(read, tensors[span.variant])
        longer = LoadJob(
            "longer", (*wanted, VariantSpan(key(9), 131, 140)), 0, 140, BLOCKS, "tenant"
        )
        assert worker.load(longer).tokens == 128, "full blocks of the values in the tier"
    finally:
        worker.connector.close()
        store.service.stop()
