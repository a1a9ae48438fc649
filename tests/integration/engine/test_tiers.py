"""An engine's own tiers in a real vLLM server, above a real store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.completion import Completion, complete
from harness.processes import running_cachestore, running_engine
from ragcache_core.plan.prompt import Prompt, plan_exact
from ragcache_core.store_api import Deletion
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import engine_pb2
from tests.integration.engine.test_vllm import ENGINE_ARGUMENTS, Platform, make_prompt
from tests.kit.engine import samples, total
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(900)

WAIT_S = 60.0


class Tiered(Platform):
    """An engine with a host tier, and a device pool that is also host memory."""

    def ask_uncached(
        self, prompt: Prompt, domain: str = "public"
    ) -> tuple[Completion, engine_pb2.RequestRecord]:
        """Bypass vLLM's own prefix cache, so that all values come from a tier or the store."""
        request = uuid.uuid4().hex
        plan = plan_exact(prompt, self.space, domain, request).encode()
        answer = complete(
            self.engine.url, prompt.token_ids, max_tokens=16, plan=plan, cache_salt=request
        )
        return answer, self.record(request)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels."""
        return total(samples(self.engine.url, f"ragcache_engine_{name}", **labels))

    def values_by_tier(self, tier: str) -> float:
        return self.metric("loaded_values_total", tier=tier)


@pytest.fixture(scope="module")
def tiered(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    folder = tmp_path_factory.mktemp("tiered")
    space = load_model_folder(str(tiny_model)).space("auto")
    settings = {"RAGCACHE_HOST_TIER_BYTES": "64Mi", "RAGCACHE_DEVICE_POOL_BYTES": "1Mi"}
    with running_cachestore(folder / "store") as store:
        arguments = (folder, tiny_model, store.address, *ENGINE_ARGUMENTS)
        with running_engine(*arguments, settings=settings) as engine:
            yield Tiered(folder, tiny_model, store, engine, space)


def test_computed_values_are_loaded_from_the_tiers(tiered: Tiered) -> None:
    prompt = make_prompt(1)
    computed, _ = tiered.ask_uncached(prompt)
    tiered.wait_until_stored(prompt)
    client = StoreClient(tiered.store.address)
    uses = client.stats(WAIT_S).reported_uses
    loaded, record = tiered.ask_uncached(prompt)
    assert record.loaded_tokens == prompt.chunk_ends[-1]
    assert record.loaded_bytes == sum(map(len, tiered.values(prompt)))
    assert loaded.token_ids == computed.token_ids == tiered.compute(prompt).token_ids
    wait_until(lambda: tiered.values_by_tier("device") + tiered.values_by_tier("host") == 5)
    assert tiered.values_by_tier("store") == 0
    held = tiered.metric("tier_bytes", tier="host") + tiered.metric("tier_bytes", tier="device")
    assert held >= record.loaded_bytes
    # The engine reports these uses to the store, which served none of them.
    wait_until(lambda: client.stats(WAIT_S).reported_uses >= uses + 5)
    client.close()


def test_kv_from_a_tier_equals_the_saved_kv(tiered: Tiered) -> None:
    """Loaded KV is saved again under another domain's keys, with the same bytes."""
    prompt = make_prompt(2)
    tiered.ask_uncached(prompt)
    tiered.wait_until_stored(prompt)
    before = tiered.values_by_tier("store")
    salt = uuid.uuid4().hex  # vLLM keeps the loaded blocks for the other domain
    for domain in ("public", "elsewhere"):
        plan = plan_exact(prompt, tiered.space, domain, uuid.uuid4().hex).encode()
        complete(tiered.engine.url, prompt.token_ids, max_tokens=1, plan=plan, cache_salt=salt)
    tiered.wait_until_stored(prompt, "elsewhere")
    assert tiered.values(prompt, "elsewhere") == tiered.values(prompt)
    assert tiered.values_by_tier("store") == before


def test_a_deleted_value_is_not_served_from_a_tier(tiered: Tiered) -> None:
    prompt = make_prompt(3)
    answer, _ = tiered.ask_uncached(prompt)
    tiered.wait_until_stored(prompt)
    client = StoreClient(tiered.store.address)
    last = tiered.keys(prompt)[-1]
    assert client.delete(Deletion(uuid.uuid4().bytes, chunks=(last.chunk,))) == 1
    client.close()
    again, record = tiered.ask_uncached(prompt)
    assert record.loaded_tokens == prompt.chunk_ends[-2]
    assert again.token_ids == answer.token_ids
