"""The simulated engine of benchmarks, beside a real store and as a gateway sees an engine."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.support.cluster.engine_times import EngineTimes
from bench.support.cluster.open_loop import ask
from bench.support.cluster.simulated_engine import EngineConfig
from harness.processes import (
    CacheStore,
    Service,
    answers,
    free_port,
    running_cachestore,
)
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.identity.keys import domain_salt
from ragcache_core.plan.prompt import assemble, plan_exact
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import NamedSegment, checked_segments
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.clients.feed_client import ENGINE_FEED
from ragcache_wire.v1 import engine_pb2 as pb
from tests.kit.engine import is_stored
from tests.kit.gateway import following
from tests.kit.wait import until

BLOCK = 16
TIMES = EngineTimes(
    PrefillProfile((0,), (1, 100), ((1e-5, 1e-3),), 256),
    accept_s=0.0,
    decode_s=1e-4,
    decode_token_s=0.0,
    context_token_s=0.0,
    load_s=1e-4,
    load_token_s=0.0,
    block_tokens=BLOCK,
    cache_tokens=2000,
)
PROMPT = assemble(range(32), [range(100, 260), range(300, 540)], range(40))
DOMAIN = "public"


class Simulated:
    """Two simulated engines of one process, and their store."""

    def __init__(self, folder: Path, model: Path, store: CacheStore) -> None:
        self.store = store
        self.space = load_model_folder(str(model)).space("auto")
        configs, self.engines = [], []
        for _ in range(2):
            port, records = free_port(), f"127.0.0.1:{free_port()}"
            environment = {
                "RAGCACHE_CACHESTORE": store.address,
                "RAGCACHE_RECORDS_LISTEN": records,
                "RAGCACHE_LOAD_ALWAYS": "on",
            }
            configs.append(EngineConfig(port, str(model), "auto", environment, TIMES.to_json()))
            self.engines.append((f"http://127.0.0.1:{port}", records))
        file = folder / "engines.json"
        file.write_text(json.dumps([asdict(one) for one in configs]))
        command = [sys.executable, "-m", "bench.support.cluster.simulated_engine", str(file)]
        self.service = Service("engines", command, {}, folder / "engines.log")

    async def ask(self, index: int) -> pb.RequestRecord:
        """Ask for three tokens, and return the engine's record."""
        name, (url, records) = uuid.uuid4().hex, self.engines[index]
        body = {
            "prompt": list(PROMPT.token_ids),
            "max_tokens": 3,
            "stream": True,
            "cache_salt": domain_salt(DOMAIN),
            "kv_transfer_params": {"ragcache": self.plan(name).encode()},
        }
        port = int(url.rpartition(":")[2])
        answered = await ask(port, "/v1/completions", body, time.monotonic())
        assert not answered.error
        client = EngineClient(records)
        try:
            return await client.request_record(name, 60)
        finally:
            await client.close()

    def plan(self, name: str = "") -> ReusePlan:
        return plan_exact(PROMPT, self.space, DOMAIN, name)

    @property
    def segments(self) -> Sequence[NamedSegment]:
        return checked_segments(self.plan(), PROMPT.token_ids, self.space)


@pytest.fixture(scope="module")
def simulated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    folder = tmp_path_factory.mktemp("simulated")
    with running_cachestore(folder / "store") as store:
        found = Simulated(folder, tiny_model, store)
        try:
            url = f"{found.engines[1][0]}/health"
            found.service.wait_until("ready", lambda: answers(url))
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
