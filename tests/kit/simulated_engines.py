"""Simulated engines beside a real store: the connector's scheduler half is the product's."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.support.cluster.engine_times import EngineTimes
from bench.support.cluster.open_loop import ask
from bench.support.cluster.simulated_engine import EngineConfig
from harness.processes import CacheStore, Service, answers, free_port
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.identity.keys import domain_salt
from ragcache_core.plan.prompt import assemble, plan_exact
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import NamedSegment, checked_segments
from ragcache_core.plan.signature import SIGNATURE_FIELD, sign
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.v1 import engine_pb2 as pb
from ragcache_wire.watched.signing_keys import SigningKeys

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
    """Two simulated engines of one process, and their store.

    Args:
        key_file: Signing keys of the platform; None: it has none.
    """

    def __init__(
        self, folder: Path, model: Path, store: CacheStore, key_file: Path | None = None
    ) -> None:
        self.store = store
        self._keys = None if key_file is None else SigningKeys(key_file)
        self.credentials = Credentials(self._keys)
        self.space = load_model_folder(str(model)).space("auto")
        configs, self.engines = [], []
        for _ in range(2):
            port, records = free_port(), f"127.0.0.1:{free_port()}"
            environment = {
                "RAGCACHE_CACHESTORE": store.address,
                "RAGCACHE_RECORDS_LISTEN": records,
                "RAGCACHE_LOAD_ALWAYS": "on",
                **({} if key_file is None else {"RAGCACHE_SIGNING_KEY_FILE": str(key_file)}),
            }
            configs.append(EngineConfig(port, str(model), "auto", environment, TIMES.to_json()))
            self.engines.append((f"http://127.0.0.1:{port}", records))
        file = folder / "engines.json"
        file.write_text(json.dumps([asdict(one) for one in configs]))
        command = [sys.executable, "-m", "bench.support.cluster.simulated_engine", str(file)]
        self.service = Service("engines", command, {}, folder / "engines.log")

    def wait_until_ready(self) -> None:
        """Wait until the engines serve."""
        self.service.wait_until("ready", lambda: answers(f"{self.engines[1][0]}/health"))

    async def ask(self, index: int) -> pb.RequestRecord:
        """Ask for three tokens, and return the engine's record."""
        name = uuid.uuid4().hex
        await self.send(index, self.params(name))
        return await self.record(index, name)

    def params(self, name: str, age_s: float = 0.0) -> dict[str, Any]:
        """Return what a gateway has sent of a plan, some seconds ago."""
        plan = self.plan(name).encode()
        if self._keys is None:
            return {"ragcache": plan}
        key = self._keys.current()[0]
        signature = sign(plan, PROMPT.token_ids, key, time.time() - age_s)
        return {"ragcache": plan, SIGNATURE_FIELD: signature}

    async def send(self, index: int, params: dict[str, Any]) -> None:
        """Ask for three tokens."""
        body = {
            "prompt": list(PROMPT.token_ids),
            "max_tokens": 3,
            "stream": True,
            "cache_salt": uuid.uuid4().hex if self._keys else domain_salt(DOMAIN),
            "kv_transfer_params": params,
        }
        port = int(self.engines[index][0].rpartition(":")[2])
        answered = await ask(port, "/v1/completions", body, time.monotonic())
        assert not answered.error

    async def record(self, index: int, name: str) -> pb.RequestRecord:
        """Return an engine's record of a request. Raises NotFound."""
        client = EngineClient(self.engines[index][1], self.credentials)
        try:
            return await client.request_record(name, 60)
        finally:
            await client.close()

    def plan(self, name: str = "") -> ReusePlan:
        return plan_exact(PROMPT, self.space, DOMAIN, name)

    @property
    def segments(self) -> Sequence[NamedSegment]:
        return checked_segments(self.plan(), PROMPT.token_ids, self.space)
