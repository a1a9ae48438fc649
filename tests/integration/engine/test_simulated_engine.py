"""The simulated engine of benchmarks, beside a real store and as a gateway sees an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.processes import running_cachestore
from ragcache_wire.clients.feed_client import ENGINE_FEED
from tests.kit.engine import is_stored
from tests.kit.gateway import following
from tests.kit.simulated_engines import BLOCK, PROMPT, Simulated
from tests.kit.wait import until


@pytest.fixture(scope="module")
def simulated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    folder = tmp_path_factory.mktemp("simulated")
    with running_cachestore(folder / "store") as store:
        found = Simulated(folder, tiny_model, store)
        try:
            found.wait_until_ready()
            yield found
        finally:
            found.service.stop()


async def test_kv_is_reused_in_the_engine_and_through_the_store(simulated: Simulated) -> None:
    first = await simulated.ask(0)
    assert first.prompt_tokens == len(PROMPT.token_ids)
    assert first.local_tokens == 0
    again = await simulated.ask(0)
    assert again.local_tokens == (len(PROMPT.token_ids) - 1) // BLOCK * BLOCK
    variants = [named.variant for named in simulated.segments]
    await until(lambda: is_stored(simulated.store.address, variants), "saves")
    loaded = await simulated.ask(1)
    assert loaded.loaded_tokens == simulated.segments[-1].segment.end
    assert not loaded.miss


async def test_a_gateway_is_told_what_the_engine_has(simulated: Simulated) -> None:
    await simulated.ask(0)
    async with following(simulated.engines[0][1], ENGINE_FEED) as source:
        await source.shows({named.variant: "device" for named in simulated.segments})
