"""Tensor parallel engines: two ranks of a real vLLM, joined by gloo, with a real store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from harness.completion import Completion, complete, record_of
from harness.plans import blend_for_all, exact_for_all
from harness.processes import (
    COMPUTES_PLAIN,
    CacheStore,
    Engine,
    launch_engine,
    start_cachestore,
    vllm_cache_root,
    wait_for_engine,
)
from ragcache_core.blend.observation import ChunkObservation, observation_key
from ragcache_core.identity.keys import KVSpace, VariantKey, rank_chunk, rank_key
from ragcache_core.identity.variant import Miss
from ragcache_core.plan.prompt import Prompt
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import Deletion, LookupKey
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from ragcache_kv.values.layout import value_bytes
from ragcache_wire.v1 import engine_pb2
from tests.integration.engine.test_blend import (
    ENGINE_ARGUMENTS,
    LENGTHS,
    TEMPLATE_TOKENS,
    make_blend_prompt,
)
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(900)

RANKS = 2
WAIT_S = 60.0
CAPTURED = [make_blend_prompt(0, 1, 2), make_blend_prompt(3, 4, 5)]
NOISE = 2e-3
"""Bound of the difference of log-probabilities: float32 sums in another order."""


@dataclass
class RankedEngine:
    """An engine of some ranks on a store, which can be replaced by a new one."""

    folder: Path
    model: Path
    store: CacheStore
    num_ranks: int

    def __post_init__(self) -> None:
        folder = load_model_folder(str(self.model))
        self.space: KVSpace = folder.space("float32", num_ranks=self.num_ranks)
        self.start()

    def start(self) -> None:
        """Start an engine with an empty cache."""
        self.folder.mkdir(exist_ok=True)
        self.engine: Engine = launch_engine(
            *(self.folder, self.model, self.store.address, *ENGINE_ARGUMENTS),
            *("--tensor-parallel-size", str(self.num_ranks)),
            number_type="float32",
            settings={
                "VLLM_CACHE_ROOT": str(vllm_cache_root(self.folder)),
                # vLLM binds the threads of each rank to a NUMA node of its own.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                **COMPUTES_PLAIN,
            },
        )

    def ask(self, prompt: Prompt, plan: ReusePlan) -> tuple[Completion, engine_pb2.RequestRecord]:
        """Ask with a plan, and without vLLM's own prefix cache."""
        answer = complete(
            *(self.engine.url, prompt.token_ids),
            max_tokens=16,
            plan=plan.encode(),
            cache_salt=uuid.uuid4().hex,
        )
        return answer, record_of(self.engine, plan.request)

    def exact(self, prompt: Prompt) -> tuple[Completion, engine_pb2.RequestRecord]:
        return self.ask(prompt, exact_for_all(prompt, self.space, "public", uuid.uuid4().hex))

    def blend(self, prompt: Prompt, share: float) -> tuple[Completion, engine_pb2.RequestRecord]:
        request = uuid.uuid4().hex
        return self.ask(prompt, blend_for_all(prompt, self.space, "public", request, share))

    def compute(self, prompt: Prompt) -> Completion:
        salt = uuid.uuid4().hex
        return complete(self.engine.url, prompt.token_ids, max_tokens=16, cache_salt=salt)

    def logprobs(self, prompt: Prompt, share: float) -> dict[str, float]:
        """Return log-probabilities of the first token of a blend's answer, by token."""
        plan = blend_for_all(prompt, self.space, "public", uuid.uuid4().hex, share)
        body = {
            "model": "model",
            "prompt": list(prompt.token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
            "cache_salt": uuid.uuid4().hex,
            "kv_transfer_params": {"ragcache": plan.encode()},
        }
        reply = httpx.post(f"{self.engine.url}/v1/completions", json=body, timeout=120)
        found: dict[str, float] = reply.raise_for_status().json()["choices"][0]["logprobs"][
            "top_logprobs"
        ][0]
        return found

    def keys(self, prompt: Prompt) -> list[VariantKey]:
        plan = exact_for_all(prompt, self.space, "public", "probe")
        return [named.variant for named in checked_segments(plan, prompt.token_ids, self.space)]

    def rank_keys(self, prompt: Prompt) -> list[VariantKey]:
        """Return the names of all ranks' parts."""
        return [rank_key(key, rank) for rank in range(self.num_ranks) for key in self.keys(prompt)]

    def observations(self, client: StoreClient) -> list[ChunkObservation]:
        """Return those of the chunks of CAPTURED, when they are stored."""
        keys = [observation_key(key) for prompt in CAPTURED for key in self.keys(prompt)[1:]]
        wait_until(lambda: are_stored(client, keys), "chunks are not observed")
        found = []
        for _, value in client.get(keys, timeout_s=WAIT_S):
            assert not isinstance(value, Miss)
            found.append(ChunkObservation.from_bytes(value.value))
        return found


def are_stored(client: StoreClient, keys: list[VariantKey]) -> bool:
    wants = [LookupKey.for_variant(key) for key in keys]
    return all(found.stored for found in client.lookup(wants, WAIT_S).variants)


@dataclass
class Pair:
    """An engine of two ranks that has restarted, one of one rank, and their store."""

    ranked: RankedEngine
    single: RankedEngine
    client: StoreClient


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both engines have computed and observed CAPTURED. Then the one of two ranks was replaced."""
    folder = tmp_path_factory.mktemp("ranks")
    store = start_cachestore(folder / "store")
    client = StoreClient(store.address)
    started: list[RankedEngine] = []
    try:
        for count in (RANKS, 1):
            started.append(RankedEngine(folder / str(count), tiny_model, store, count))
            wait_for_engine(started[-1].engine)
        pair = Pair(started[0], started[1], client)
        for one in started:
            for prompt in CAPTURED:
                one.blend(prompt, 0.0)
                wait_until(lambda: are_stored(client, one.rank_keys(prompt)), "not saved")  # noqa: B023
            one.observations(client)
        pair.ranked.engine.service.stop()
        pair.ranked.start()
        wait_for_engine(pair.ranked.engine)
        yield pair
    finally:
        for one in started:
            one.engine.service.stop()
        client.close()
        store.service.stop()


def test_each_rank_stores_its_own_heads(pair: Pair) -> None:
    space = pair.ranked.space
    prompt = CAPTURED[0]
    values = [value for _, value in pair.client.get(pair.ranked.rank_keys(prompt), WAIT_S)]
    for value in values:
        assert not isinstance(value, Miss)
        assert value.shape is not None
        assert value.shape.num_kv_heads == space.num_kv_heads // RANKS
        assert len(value.value) == value_bytes(space.of_rank(), value.info.num_tokens)


def test_a_new_engine_restores_values_and_gives_the_same_answer(pair: Pair) -> None:
    prompt = CAPTURED[0]
    answer, record = pair.ranked.exact(prompt)
    tokens = prompt.chunk_ends[-1]
    assert (record.loaded_tokens, record.miss) == (tokens, "")
    assert record.loaded_bytes == value_bytes(pair.ranked.space, tokens), "of all ranks, once"
    assert answer.token_ids == pair.ranked.compute(prompt).token_ids


@pytest.mark.parametrize(("order", "share"), [((2, 0, 1), 1.0), ((4, 1, 3, 0), 0.15), ((1, 5), 0)])
def test_a_blend_equals_that_of_a_single_rank(
    pair: Pair, order: tuple[int, ...], share: float
) -> None:
    prompt = make_blend_prompt(*order)
    answer, record = pair.ranked.blend(prompt, share)
    expected, expected_record = pair.single.blend(prompt, share)
    context = sum(LENGTHS[chunk] for chunk in order)
    assert (record.blended_tokens, record.recomputed_tokens) == (context, int(share * context))
    assert record.recomputed_tokens == expected_record.recomputed_tokens
    assert record.loaded_bytes == expected_record.loaded_bytes, "of all ranks, once"
    assert answer.token_ids == expected.token_ids
    found, wanted = pair.ranked.logprobs(prompt, share), pair.single.logprobs(prompt, share)
    assert found == pytest.approx(wanted, abs=NOISE)


def test_observations_are_of_all_heads(pair: Pair) -> None:
    found, wanted = pair.ranked.observations(pair.client), pair.single.observations(pair.client)
    for one, other in zip(found, wanted, strict=True):
        assert one.influence == pytest.approx(other.influence, rel=1e-2, abs=1e-3)
        assert one.intra == pytest.approx(other.intra, rel=1e-3)


def test_a_value_that_one_rank_lacks_is_missing_for_all(pair: Pair) -> None:
    prompt = CAPTURED[1]
    lost = pair.ranked.keys(prompt)[2]
    part = rank_chunk(lost.chunk, RANKS - 1)
    removed = pair.client.delete(Deletion(uuid.uuid4().bytes, chunks=(part,)))
    assert removed == 1, "the part of the other rank stays"
    answer, record = pair.ranked.exact(prompt)
    assert record.loaded_tokens == TEMPLATE_TOKENS + LENGTHS[3]
    assert answer.token_ids == pair.ranked.compute(prompt).token_ids
    wait_until(lambda: are_stored(pair.client, pair.ranked.rank_keys(prompt)), "not saved again")


def test_metrics_count_each_load_once(pair: Pair) -> None:
    def counted(name: str, label: str) -> float:
        lines = httpx.get(f"{pair.ranked.engine.url}/metrics", timeout=60).text.splitlines()
        wanted = (line for line in lines if line.startswith(f"{name}{{") and label in line)
        return sum(float(line.rsplit(maxsplit=1)[1]) for line in wanted)

    def exact_tokens() -> float:
        return counted("ragcache_engine_prompt_tokens_total", 'kind="exact"')

    before = exact_tokens()
    _, record = pair.ranked.exact(CAPTURED[0])
    wait_until(lambda: exact_tokens() >= before + record.loaded_tokens, "the load is not counted")
    assert exact_tokens() == before + record.loaded_tokens


def test_a_delete_of_a_chunk_removes_the_parts_of_all_ranks(pair: Pair) -> None:
    # The last test: it deletes what others load.
    keys = pair.ranked.rank_keys(CAPTURED[0])
    pair.client.delete(
        Deletion(uuid.uuid4().bytes, chunks=(pair.ranked.keys(CAPTURED[0])[1].chunk,))
    )
    found = pair.client.lookup([LookupKey.for_variant(key) for key in keys], WAIT_S).variants
    per_rank = len(keys) // RANKS
    # What comes before the chunk stays.
    assert [bool(one.stored) for one in found] == [i % per_rank < 1 for i in range(len(keys))]
