"""The contestants of a sequence: an engine each, with a store of its own where it needs one."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from bench.contestants.contestant import Absent, Server, lmcache_server
from bench.support.number_type import fast_number_type
from bench.support.sequences.figures import Measured
from bench.support.sequences.requests import (
    SequenceRequest,
    plan_request,
)
from harness.completion import complete
from harness.processes import (
    CacheStore,
    Engine,
    launch_cachestore,
    launch_engine,
    wait_for_cachestore,
    wait_for_engine,
)
from harness.vllm_plugin import WAITS_ASLEEP, plugin_settings
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.clients.engine_client import EngineClient

DOMAIN = "public"
PLAIN, PLAIN_AGAIN, LMCACHE = "plain", "plain_again", "lmcache"
EXACT, BLEND = "exact", "blend"
EXACT_AHEAD, BLEND_AHEAD = "exact_ahead", "blend_ahead"
ALL = (PLAIN, PLAIN_AGAIN, LMCACHE, EXACT, BLEND, EXACT_AHEAD, BLEND_AHEAD)
OURS = frozenset({EXACT, BLEND, EXACT_AHEAD, BLEND_AHEAD})
AHEAD = frozenset({EXACT_AHEAD, BLEND_AHEAD})
PREFIX_ONLY = frozenset({PLAIN, PLAIN_AGAIN, LMCACHE, EXACT})
"""Contestants that only reuse prefixes."""

RECOMPUTE_SHARE = 0.15
ANSWER_TOKENS = 4
KV_CACHE_GIB = 1
"""Of each engine."""

_IDLE_SHARE = 0.25
"""Of one core. vLLM polls for a second after its last step, and sleeps in between."""

_IDLE_PERIOD_S = 0.25
_IDLE_TIMEOUT_S = 300.0
_STORE_MEMORY_BYTES = 2 << 30
_STORE_DISK_BYTES = 16 << 30
_RECORD_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What all contestants have in common.

    Attributes:
        model: Folder of the model.
        max_length: Longest prompt with its answer, in tokens.
        one_plain_engine: Whether the plain contestants share an engine and its KV cache, with a
            namespace each. It saves an engine's start.
    """

    model: Path
    space: KVSpace
    max_length: int
    one_plain_engine: bool


def _new_client() -> httpx.Client:
    # A server closes idle connections, and a request on one of them would fail.
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(verify=False, trust_env=False, limits=limits)


@dataclass(slots=True)
class SequenceContestant:
    """One engine.

    Attributes:
        store: The engine's cache store, for our connector.
        cache_salt: Namespace in vLLM's prefix cache, for an engine with two contestants.
    """

    name: str
    setup: Setup
    engine: Engine
    store: CacheStore | None = None
    cache_salt: str | None = None
    _client: httpx.Client = field(default_factory=_new_client)

    def ask(self, request: SequenceRequest) -> tuple[Measured, str]:
        """Ask for one answer, and return its time with the id of its record."""
        name, token_ids = uuid.uuid4().hex, request.token_ids
        plan = self._plan(request, name)
        answer = complete(
            self.engine.url,
            token_ids,
            max_tokens=ANSWER_TOKENS,
            plan=plan.encode() if plan else None,
            cache_salt=self.cache_salt,
            usage=True,
            client=self._client,
        )
        return Measured(answer.ttft_s, len(token_ids), answer.cached_tokens), name

    def compute_ahead(self, prompts: Sequence[SequenceRequest]) -> float:
        """Compute prompts of passages one after another, and return the seconds it took.

        The plan is the one that a gateway sends for it, in both modes.
        """
        started = time.monotonic()
        for prompt in prompts:
            # vLLM always computes a prompt's last token, and a segment has to be complete.
            token_ids = (*prompt.token_ids, prompt.token_ids[-1])
            plan = plan_request(prompt, self.setup.space, DOMAIN, uuid.uuid4().hex, None)
            complete(self.engine.url, token_ids, max_tokens=1, plan=plan.encode())
        self.wait_until_idle()
        return time.monotonic() - started

    def replay(self, requests: Sequence[SequenceRequest], gap_s: float) -> list[Measured]:
        """Ask requests and return their measurements, with the engine's records.

        Args:
            requests: In order.
            gap_s: Time between an answer's end and the next request.
        """
        before_s = self._used_cpu_s()
        asked = []
        for request in requests:
            asked.append(self.ask(request))
            time.sleep(gap_s)
        self.wait_until_idle()
        cpu_s = (self._used_cpu_s() - before_s) / max(1, len(requests))
        return [replace(one, cpu_s=cpu_s) for one in self._with_records(asked)]

    def wait_until_idle(self) -> None:
        """Wait until engine and store use next to no CPU, so that the next turn has all of it."""
        deadline = time.monotonic() + _IDLE_TIMEOUT_S
        last_s = self._used_cpu_s()
        while True:
            time.sleep(_IDLE_PERIOD_S)
            now_s = self._used_cpu_s()
            if now_s - last_s <= _IDLE_SHARE * _IDLE_PERIOD_S:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} was not idle after {_IDLE_TIMEOUT_S} s")
            last_s = now_s

    def store_bytes(self) -> dict[str, int]:
        """Return bytes that its store has on disk, and those moved by each transport so far."""
        if self.store is None:
            return {}
        client = StoreClient(self.store.address)
        stats = client.stats()
        client.close()
        moved = {f"moved_{name}": count for name, count in stats.bytes_by_transport.items()}
        return {"stored": max(stats.disk_bytes, stats.memory_bytes), **moved}

    def _plan(self, request: SequenceRequest, name: str) -> ReusePlan | None:
        if self.store is None:
            return None
        blends = self.name in (BLEND, BLEND_AHEAD)
        share = RECOMPUTE_SHARE if blends else None
        return plan_request(request, self.setup.space, DOMAIN, name, share)

    def _with_records(self, asked: Sequence[tuple[Measured, str]]) -> list[Measured]:
        if self.store is None:
            return [measured for measured, _ in asked]

        async def fetch() -> list[Measured]:
            assert self.engine.records is not None
            client = EngineClient(self.engine.records)
            try:
                return [
                    replace(measured, record=await client.request_record(name, _RECORD_TIMEOUT_S))
                    for measured, name in asked
                ]
            finally:
                await client.close()

        return asyncio.run(fetch())

    def _used_cpu_s(self) -> float:
        used_s = self.engine.service.cpu_s()
        return used_s if self.store is None else used_s + self.store.service.cpu_s()


@contextlib.contextmanager
def running_contestants(
    folder: Path, names: Sequence[str], setup: Setup
) -> Iterator[tuple[dict[str, SequenceContestant], dict[str, str]]]:
    """Start contestants together, and stop them at the end.

    Yields:
        The contestants by name, and why others were skipped.
    """
    contestants: dict[str, SequenceContestant] = {}
    skipped: dict[str, str] = {}
    usual = plugin_settings(folder / "plugin", WAITS_ASLEEP) | {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "RAGCACHE_LOAD_ALWAYS": "off",
    }
    with contextlib.ExitStack() as stack:
        for name in names:
            if name == PLAIN_AGAIN and setup.one_plain_engine:
                continue
            try:
                contestant = _launch(folder / name, name, setup, usual, stack)
            except Absent as absent:
                skipped[name] = str(absent)
            else:
                contestants[name] = contestant
        for contestant in contestants.values():
            if contestant.store is not None:
                wait_for_cachestore(contestant.store)
            wait_for_engine(contestant.engine)
        if PLAIN_AGAIN in names and setup.one_plain_engine:
            shared = contestants[PLAIN].engine
            contestants[PLAIN_AGAIN] = SequenceContestant(
                PLAIN_AGAIN, setup, shared, cache_salt=PLAIN_AGAIN
            )
        yield contestants, skipped


def _launch(
    folder: Path,
    name: str,
    setup: Setup,
    settings: Mapping[str, str],
    stack: contextlib.ExitStack,
) -> SequenceContestant:
    store, arguments = None, list[str]()
    if name in OURS:
        store = launch_cachestore(
            folder / "store", memory_bytes=_STORE_MEMORY_BYTES, disk_bytes=_STORE_DISK_BYTES
        )
        stack.callback(store.service.stop)
    elif name == LMCACHE:
        server = _start_lmcache_server()
        stack.callback(server.end)
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
        connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
        connector_config = {**connector, "kv_connector_extra_config": extra}
        arguments = ["--kv-transfer-config", json.dumps(connector_config)]
    engine = launch_engine(
        folder,
        setup.model,
        store.address if store else None,
        *arguments,
        max_length=setup.max_length,
        settings=settings,
        number_type=fast_number_type(),
    )
    stack.callback(engine.service.stop)
    return SequenceContestant(name, setup, engine, store)


def _start_lmcache_server() -> Server:
    """Start ``lmcache server``. Raises Absent if LMCache is not installed or does not start."""
    if importlib.util.find_spec("lmcache") is None:
        raise Absent("lmcache is not installed")
    return lmcache_server(memory_gb=2, LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="WARNING")
