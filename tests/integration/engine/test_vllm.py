"""The connector inside real vLLM servers, with a real cache store."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from harness.completion import Completion, complete, is_clear, record_of
from harness.processes import (
    COMPUTES_PLAIN,
    CacheStore,
    Engine,
    launch_engine,
    start_cachestore,
    vllm_cache_root,
    wait_for_engine,
)
from harness.stored_values import corrupt
from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import NotFound
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import Miss
from ragcache_core.plan.prompt import Prompt, assemble, plan_exact
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import checked_segments
from ragcache_core.plan.signature import sign
from ragcache_core.store_api import Deletion, LookupKey
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_wire.clients.engine_client import EngineClient
from ragcache_wire.peers.credentials import Credentials
from ragcache_wire.v1 import engine_pb2
from ragcache_wire.watched.members import FixedMembers
from ragcache_wire.watched.signing_keys import SigningKeys
from tests.kit.engine import STORE_AWAY, is_stored, samples, total
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(600)

WAIT_S = 60.0
OLD_KEY, KEY = random.Random("old key").randbytes(32), random.Random("key").randbytes(32)
VOCABULARY = 350
SLOWEST_S = 1234.5
"""Seconds of a pass, longer than any engine here measures."""
# Smaller than most prompts here, so that every prefill runs in several pieces.
ENGINE_ARGUMENTS = ("--max-num-batched-tokens", "384")


def make_prompt(seed: int, shared: int = 0) -> Prompt:
    """Prompts with the same ``shared`` have the template and first two chunks in common."""
    common, own = random.Random(f"shared {shared}"), random.Random(f"own {seed}")

    def ids(rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    # Only the context ends at a block's end (640 = 5 x 128), so that vLLM's own prefix cache leaves
    # the same tokens to compute as the store.
    chunks = [ids(common, 131), ids(common, 200), ids(own, 177), ids(own, 91)]
    return assemble(ids(common, 41), chunks, ids(own, 23))


def launch(
    folder: Path, model: Path, store: CacheStore, given: Mapping[str, str] | None = None
) -> Engine:
    settings = {"VLLM_CACHE_ROOT": str(vllm_cache_root(folder)), **COMPUTES_PLAIN, **(given or {})}
    return launch_engine(folder, model, store.address, *ENGINE_ARGUMENTS, settings=settings)


@dataclass
class Platform:
    """A cache store, and an engine that can be replaced by a new one."""

    folder: Path
    model: Path
    store: CacheStore
    engine: Engine
    space: KVSpace

    def ask(
        self, prompt: Prompt, domain: str = "public", max_tokens: int = 16
    ) -> tuple[Completion, engine_pb2.RequestRecord]:
        request = uuid.uuid4().hex
        plan = plan_exact(prompt, self.space, domain, request)
        completion = self.complete(prompt, plan, max_tokens=max_tokens)
        return completion, self.record(request)

    def complete(
        self,
        prompt: Prompt,
        plan: ReusePlan,
        max_tokens: int = 16,
        cache_salt: str | None = None,
    ) -> Completion:
        """Ask with a signed plan, as a gateway does."""
        plan_text = plan.encode()
        return complete(
            self.engine.url,
            prompt.token_ids,
            max_tokens=max_tokens,
            plan=plan_text,
            signature=sign(plan_text, prompt.token_ids, KEY, time.time()),
            cache_salt=cache_salt,
        )

    def compute(self, prompt: Prompt, max_tokens: int = 16) -> Completion:
        """Compute without plan and store, over a prefix that vLLM has cached."""
        salt = uuid.uuid4().hex
        complete(self.engine.url, prompt.token_ids, max_tokens=1, cache_salt=salt)
        return complete(self.engine.url, prompt.token_ids, max_tokens=max_tokens, cache_salt=salt)

    def record(self, request: str) -> engine_pb2.RequestRecord:
        return record_of(self.engine, request, Credentials(self.signing_keys))

    @property
    def signing_keys(self) -> SigningKeys | None:
        """The engine's keys; the first engine has none."""
        path = self.folder / "keys"
        return SigningKeys(path) if path.exists() else None

    def keys(self, prompt: Prompt, domain: str = "public") -> list[VariantKey]:
        plan = plan_exact(prompt, self.space, domain, "probe")
        return [named.variant for named in checked_segments(plan, prompt.token_ids, self.space)]

    def wait_until_stored(self, prompt: Prompt, domain: str = "public") -> None:
        """Wait: values are saved after the answer."""
        assert self.is_stored_within(WAIT_S, prompt, domain), "not saved"

    def is_stored_within(self, limit_s: float, prompt: Prompt, domain: str = "public") -> bool:
        deadline = time.monotonic() + limit_s
        while not is_stored(self.store.address, self.keys(prompt, domain)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def values(self, prompt: Prompt, domain: str = "public") -> list[bytes]:
        client = StoreClient(self.store.address)
        found = [stored for _, stored in client.get(self.keys(prompt, domain), timeout_s=WAIT_S)]
        client.close()
        assert not any(isinstance(stored, Miss) for stored in found)
        return [bytes(stored.value) for stored in found if not isinstance(stored, Miss)]

    def metrics(self, *names: str) -> list[str]:
        """Return the lines of the engine's metrics that begin with one of the names."""
        return samples(self.engine.url, *names)

    def counted(self, name: str) -> float:
        """Return the sum of a counter over all labels except kind="computed"."""
        return total(one for one in self.metrics(f"{name}_total") if 'kind="computed"' not in one)

    def unfinished_requests(self) -> list[str]:
        """Return vLLM's gauges of running and waiting requests that are not zero."""
        gauges = self.metrics("vllm:num_requests_running", "vllm:num_requests_waiting")
        assert gauges
        return [line for line in gauges if not line.endswith(" 0.0")]

    def replace_engine(self) -> None:
        """Replace the engine by one with an empty cache, signatures and layer-wise loading."""
        self.engine.service.stop()
        keys = self.folder / "keys"
        keys.write_text(f"{OLD_KEY.hex()}\n{KEY.hex()}\n")
        settings = {"RAGCACHE_SIGNING_KEY_FILE": str(keys), "RAGCACHE_LAYERWISE": "on"}
        self.engine = launch(self.folder, self.model, self.store, settings)
        wait_for_engine(self.engine)

    @property
    def profile(self) -> Path:
        """Return the path of the engine's prefill profile."""
        [path] = (self.folder / "vllm" / "ragcache").iterdir()
        return path

    def restart_store(self) -> None:
        port = int(self.store.address.rsplit(":", 1)[1])
        self.store = start_cachestore(self.folder / "store", port=port)


PROMPTS = {
    **{name: make_prompt(seed) for seed, name in enumerate(["a", "b", "c", "d", "damaged"])},
    # For the last test: the second engine has computed none of them.
    "while the store is lost": make_prompt(5, shared=60),
    "when the store is back": make_prompt(6, shared=61),
}


@pytest.fixture(scope="module")
def platform(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A store with PROMPTS, saved by an engine that has stopped, and a new engine."""
    folder = tmp_path_factory.mktemp("platform")
    store = start_cachestore(folder / "store")
    space = load_model_folder(str(tiny_model)).space("auto")
    engine = launch(folder, tiny_model, store)
    platform = Platform(folder, tiny_model, store, engine, space)
    try:
        wait_for_engine(engine)
        for prompt in PROMPTS.values():
            platform.ask(prompt)
            platform.wait_until_stored(prompt)
        # The store stops, too, so that the new engine is served from disk.
        platform.engine.service.stop()
        platform.store.service.stop()
        corrupt(folder / "store" / "data", platform.keys(PROMPTS["damaged"])[3])
        platform.restart_store()
        slower = json.loads(platform.profile.read_text())
        slower["seconds"][-1][-1] = SLOWEST_S
        platform.profile.write_text(json.dumps(slower))
        platform.replace_engine()
        yield platform
    finally:
        platform.engine.service.stop()
        platform.store.service.stop()


def test_a_new_engine_loads_saved_values_and_gives_the_same_answer(platform: Platform) -> None:
    prompt = PROMPTS["a"]
    loaded, record = platform.ask(prompt)
    assert record.loaded_tokens == prompt.chunk_ends[-1]
    assert record.loaded_bytes == sum(map(len, platform.values(prompt)))
    assert record.miss == ""
    assert loaded.token_ids == platform.compute(prompt).token_ids


def test_an_engine_connects_before_it_measures_and_serves(platform: Platform) -> None:
    log = platform.engine.service.log.read_text()
    positions = [
        log.index(line)
        for line in ("worker: connected", "connector: prefill profile", "startup complete")
    ]
    assert positions == sorted(positions)


async def test_the_prefill_profile_is_measured_once_and_served(platform: Platform) -> None:
    """The first engine measured it. The second one read the file, which the fixture changed."""
    assert platform.engine.records is not None
    client = EngineClient(platform.engine.records, Credentials(platform.signing_keys))
    costs = await client.costs()
    await client.close()
    found, saved = costs.prefill, PrefillProfile.from_json(json.loads(platform.profile.read_text()))
    assert tuple(found.cached) == saved.cached
    assert tuple(found.computed) == saved.computed
    assert found.pass_tokens == saved.pass_tokens == saved.computed[-1] == 384
    assert found.seconds[-1] == SLOWEST_S
    assert all(0 < seconds < SLOWEST_S for seconds in found.seconds[:-1])
    assert costs.correction > 0


def test_a_shared_prefix_comes_from_vllms_cache_and_the_rest_from_the_store(
    platform: Platform,
) -> None:
    platform.ask(PROMPTS["a"])
    prompt = PROMPTS["b"]  # shares the template and two chunks with "a"
    loaded, record = platform.ask(prompt)
    assert record.local_tokens > 0
    assert record.local_tokens + record.loaded_tokens == prompt.chunk_ends[-1]
    assert loaded.token_ids == platform.compute(prompt).token_ids
    # The store learns of the chunks that it did not serve.
    assert platform.counted("ragcache_engine_reported_uses") > 0
    client = StoreClient(platform.store.address)
    wait_until(lambda: client.stats(WAIT_S).reported_uses)
    client.close()


def test_loaded_kv_equals_the_saved_kv(platform: Platform) -> None:
    """Loaded KV is saved again under another domain's keys, with the same bytes."""
    prompt = PROMPTS["c"]
    salt = uuid.uuid4().hex  # vLLM keeps the loaded blocks for the other domain
    found = {}
    for domain in ("public", "elsewhere"):
        request = uuid.uuid4().hex
        plan = plan_exact(prompt, platform.space, domain, request)
        platform.complete(prompt, plan, cache_salt=salt)
        record = platform.record(request)
        found[domain] = (record.local_tokens, record.loaded_tokens)
    end = prompt.chunk_ends[-1]
    assert found == {"public": (0, end), "elsewhere": (end, 0)}
    platform.wait_until_stored(prompt, "elsewhere")
    assert platform.values(prompt, "elsewhere") == platform.values(prompt)


def test_a_corrupt_value_is_detected_and_computed(platform: Platform) -> None:
    prompt = PROMPTS["damaged"]
    answer, record = platform.ask(prompt)
    assert record.loaded_tokens < prompt.chunk_ends[-1]
    assert record.miss == "corrupt"
    client = StoreClient(platform.store.address)
    assert client.stats(WAIT_S).corrupt >= 1
    client.close()
    assert answer.token_ids == platform.compute(prompt).token_ids
    # The engine saves what it computed.
    platform.wait_until_stored(prompt)


def test_a_save_carries_its_origin_and_cost(platform: Platform) -> None:
    prompt = make_prompt(400, shared=40)
    request = uuid.uuid4().hex
    documents = [f"docs/{name}" for name in "aabc"]
    plan = plan_exact(prompt, platform.space, "tenant", request, documents)
    platform.complete(prompt, plan, max_tokens=1)
    platform.wait_until_stored(prompt, "tenant")
    assert platform.record(request).miss == "never stored"
    head, first, second, third, fourth = (named.chunk for named in plan.segments)
    client = StoreClient(platform.store.address)
    (found,) = client.lookup([LookupKey(third)], WAIT_S).variants
    assert found.stored[0].prefix_chunks == (head, first, second)
    # The delete of a document also deletes what was computed after it.
    removed = client.delete(Deletion(uuid.uuid4().bytes, documents=("docs/b",), domain="tenant"))
    assert removed >= 1
    wants = [LookupKey(chunk) for chunk in (second, third, fourth)]
    left = client.lookup(wants, WAIT_S, domain="tenant")
    assert [variants.miss for variants in left.variants][:2] == [None, Miss.DELETED]
    # Scores depend on the measured cost, so they are above zero.
    assert sum(client.stats(WAIT_S).score_histogram) > 0
    client.close()


def test_concurrent_requests_get_the_same_answers_as_single_ones(platform: Platform) -> None:
    """Batches of another shape round differently in vLLM, so the prompts have clear answers."""
    seeds = itertools.count(1000)
    prompts = [
        next(
            prompt
            for prompt in (make_prompt(seed, shared=70 + number % 3) for seed in seeds)
            if is_clear(platform.engine.url, prompt, max_tokens=2)
        )
        for number in range(12)
    ]
    expected = [platform.compute(prompt, max_tokens=2).token_ids for prompt in prompts]

    def ask(prompt: Prompt) -> tuple[tuple[int, ...], int]:
        """Ask under a unique salt. Return the answer and how many tokens the store served."""
        request = uuid.uuid4().hex
        plan = plan_exact(prompt, platform.space, "public", request)
        answer = platform.complete(prompt, plan, max_tokens=2, cache_salt=request)
        return answer.token_ids, platform.record(request).loaded_tokens

    with ThreadPoolExecutor(6) as pool:
        first = list(pool.map(ask, prompts))
        for prompt in prompts:
            platform.wait_until_stored(prompt)
        again = list(pool.map(ask, prompts))
    assert [tokens for tokens, _ in first] == expected
    assert [tokens for tokens, _ in again] == expected
    assert [loaded for _, loaded in again] == [prompt.chunk_ends[-1] for prompt in prompts]


def test_clients_that_disconnect_at_any_time_leave_the_engine_intact(platform: Platform) -> None:
    """See ``test_interrupted`` for clients that disconnect in the middle of a load."""
    prompt = PROMPTS["d"]
    plan = plan_exact(prompt, platform.space, "public", "left").encode()
    body = {
        "model": "model",
        "prompt": list(prompt.token_ids),
        "max_tokens": 200,
        "stream": True,
        "ignore_eos": True,
        "kv_transfer_params": {
            "ragcache": plan,
            "ragcache_signature": sign(plan, prompt.token_ids, KEY, time.time()),
        },
    }
    for seconds in (0.0, 0.005, 0.01, 0.02, 0.04):
        body["cache_salt"] = uuid.uuid4().hex  # so that only the store has it
        with httpx.stream("POST", f"{platform.engine.url}/v1/completions", json=body, timeout=60):
            time.sleep(seconds)  # leaving the block closes the connection
    answer, _ = platform.ask(prompt)
    assert answer.token_ids == platform.compute(prompt).token_ids
    wait_until(lambda: not platform.unfinished_requests())


def test_a_prompt_with_a_wrong_plan_is_computed(platform: Platform) -> None:
    """A plan for another prompt must not load KV of other tokens."""
    real, other = PROMPTS["a"], make_prompt(99, shared=9)
    plan = plan_exact(real, platform.space, "public", "wrong")
    answer = platform.complete(other, plan, max_tokens=8)
    assert platform.record("wrong").loaded_tokens == 0
    assert answer.token_ids == platform.compute(other, max_tokens=8).token_ids


def test_a_plan_without_a_valid_signature_loads_and_saves_nothing(
    platform: Platform,
) -> None:
    names = ("ragcache_engine_prompt_tokens", "ragcache_engine_refused_plans")
    loaded, refused = map(platform.counted, names)
    stored, new = PROMPTS["c"], make_prompt(500, shared=50)
    forgeries = 0
    for prompt in (stored, new):
        right = platform.compute(prompt).token_ids
        for key, signed_prompt, age_s in (
            *((None, prompt, 0), (bytes(32), prompt, 0), (KEY, PROMPTS["d"], 0)),
            (KEY, prompt, 91),
        ):
            request = uuid.uuid4().hex
            plan = plan_exact(prompt, platform.space, "public", request).encode()
            signature = sign(plan, signed_prompt.token_ids, key or KEY, time.time() - age_s)
            answer = complete(
                *(platform.engine.url, prompt.token_ids),
                max_tokens=16,
                plan=plan,
                signature=None if key is None else signature,
                cache_salt=request,  # so that only the store could have it
            )
            assert answer.token_ids == right
            with pytest.raises(NotFound):
                platform.record(request)
            forgeries += 1
    wait_until(lambda: platform.counted(names[1]) >= refused + forgeries, "not counted")
    assert [platform.counted(name) for name in names] == [loaded, refused + forgeries]
    # Saves are in order, so the refused prompts would have been saved before this one.
    later = make_prompt(501, shared=51)
    platform.ask(later)
    platform.wait_until_stored(later)
    assert not platform.is_stored_within(0, new)
    # The same plan with a signature is accepted.
    platform.ask(new)
    platform.wait_until_stored(new)


@pytest.mark.slow
def test_shards_can_join_while_an_engine_runs(platform: Platform) -> None:
    members = platform.folder / "members.json"

    def write(*stores: CacheStore) -> None:
        new = platform.folder / "members.new"
        new.write_text(json.dumps({"members": [store.address for store in stores]}))
        new.replace(members)

    write(platform.store)
    joining = start_cachestore(platform.folder / "joining")
    engine = launch_engine(
        *(platform.folder, platform.model, f"file:{members}", *ENGINE_ARGUMENTS),
        settings=COMPUTES_PLAIN,
    )
    several = replace(platform, engine=engine)
    try:
        wait_for_engine(engine)
        write(platform.store, joining)
        time.sleep(1.1)
        prompts = [make_prompt(seed, shared=7) for seed in range(200, 204)]
        keys = [key for prompt in prompts for key in several.keys(prompt)]
        client = ShardedStore(FixedMembers((platform.store.address, joining.address)))
        for prompt in prompts:
            several.ask(prompt, max_tokens=1)
        wants = [LookupKey.for_variant(key) for key in keys]
        wait_until(lambda: client.lookup(wants, WAIT_S).by_key().keys() == set(keys), "not saved")
        client.close()
        with_both = StoreClient(joining.address)
        found = with_both.lookup(wants, WAIT_S).variants
        there = {w for w, v in zip(wants, found, strict=True) if v.stored}
        assert 0 < len(there) < len(set(keys)), "each shard stores a part"
        with_both.close()
        for prompt in prompts:
            # Another salt hides vLLM's own cache, so everything comes from the two shards.
            request = uuid.uuid4().hex
            plan = plan_exact(prompt, several.space, "public", request).encode()
            answer = complete(
                engine.url, prompt.token_ids, max_tokens=16, plan=plan, cache_salt=request
            )
            assert several.record(request).loaded_tokens == prompt.chunk_ends[-1]
            assert answer.token_ids == several.compute(prompt).token_ids
    finally:
        engine.service.stop()
        joining.service.stop()


def test_requests_started_before_all_layers_were_loaded(platform: Platform) -> None:
    """Requests of the tests before this one, after a few loads with known write times."""
    log = platform.engine.service.log.read_text(errors="replace")
    assert re.search(r"a request starts early layers=[1-3] of=4", log)


def test_a_drain_waits_for_the_requests_in_flight(platform: Platform) -> None:
    drain = [
        *(sys.executable, "-m", "ragcache_engine.drain", "--settle-s", "0"),
        *("--deadline-s", "400", "--url", f"{platform.engine.url}/metrics"),
    ]
    body = {
        "model": "model",
        "prompt": list(make_prompt(300).token_ids),
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{platform.engine.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as reply:
        events = (line for line in reply.iter_lines() if line)
        next(events)
        done = subprocess.run(drain, capture_output=True, text=True, timeout=450, check=True)
        assert "no request is left" in done.stderr
        assert platform.unfinished_requests() == []
        *_, last = events
        assert last == "data: [DONE]"


def test_losing_the_store_costs_recomputation_and_nothing_else(platform: Platform) -> None:
    """Last, as it kills the store."""
    prompt = PROMPTS["while the store is lost"]
    platform.store.service.kill()
    answer, record = platform.ask(prompt)
    assert (record.local_tokens, record.loaded_tokens) == (0, 0)
    assert record.miss in STORE_AWAY
    assert answer.token_ids == platform.compute(prompt).token_ids
    platform.restart_store()
    seeds = itertools.count(800)

    def is_connected() -> bool:
        new = make_prompt(next(seeds))
        # Each of the engine's processes reconnects by itself: one looks up, the other saves.
        return platform.ask(new)[1].miss not in STORE_AWAY and platform.is_stored_within(2, new)

    wait_until(is_connected, "a connection to the store")
    prompt = PROMPTS["when the store is back"]
    _, record = platform.ask(prompt)
    assert (record.local_tokens, record.loaded_tokens) == (0, prompt.chunk_ends[-1])
