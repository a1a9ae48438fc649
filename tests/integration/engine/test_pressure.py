"""An engine with too few blocks for its requests: preempted, evicted, and right all the same."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from bench.support.completion import complete, record_of
from bench.support.processes import (
    COMPUTES_PLAIN,
    Engine,
    launch_engine,
    start_cachestore,
    wait_for_engine,
)
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import Prompt, assemble, plan_blend, plan_exact
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import LookupKey
from ragcache_kv.model_folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import engine_pb2

pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 120.0
NUM_TOKENS = 900
HEAD = 41
# 17 blocks of 128 tokens and one that stays free: two of the prompts, which take six each, until
# they need up to thirteen with their answers. Whichever two begin about at once, one gives way.
ENGINE_ARGUMENTS = ("--num-gpu-blocks-override", "18", "--max-num-batched-tokens", "384")

Tokens = tuple[int, ...]
T = TypeVar("T")


def make_prompt(seed: int, order: Sequence[int] = (0, 1, 2, 3)) -> Prompt:
    """With the chunks of a seed in this order, behind the same head."""
    rng = random.Random(f"pressure {seed}")

    def ids(count: int) -> list[int]:
        return [rng.randrange(350) for _ in range(count)]

    head, chunks = ids(HEAD), [ids(131), ids(200), ids(177), ids(91)]
    return assemble(head, [chunks[number] for number in order], ids(23))


PROMPTS = [make_prompt(seed) for seed in range(4)]


@dataclass
class Pressed:
    """A store, and an engine that cannot hold what it is asked at once."""

    store: str
    engine: Engine
    space: KVSpace

    def compute(self, prompt: Prompt) -> Tokens:
        """By vLLM alone, without a plan."""
        salt = uuid.uuid4().hex
        return complete(
            self.engine.url, prompt.token_ids, max_tokens=NUM_TOKENS, cache_salt=salt
        ).token_ids

    def reuse(self, prompt: Prompt) -> tuple[Tokens, int]:
        """With a plan, and nothing of its own from before; and how many tokens were loaded."""
        request = uuid.uuid4().hex
        answer = complete(
            self.engine.url,
            prompt.token_ids,
            max_tokens=NUM_TOKENS,
            plan=plan_exact(prompt, self.space, "public", request).to_json(),
            cache_salt=request,
        )
        return answer.token_ids, record_of(self.engine, request).loaded_tokens

    def blend(self, prompt: Prompt) -> tuple[Tokens, engine_pb2.RequestRecord]:
        """As reuse does, of chunks from other prompts, all of them mended; and its record."""
        request = uuid.uuid4().hex
        answer = complete(
            self.engine.url,
            prompt.token_ids,
            max_tokens=NUM_TOKENS,
            plan=plan_blend(prompt, self.space, "public", request, 1.0).to_json(),
            cache_salt=request,
        )
        return answer.token_ids, record_of(self.engine, request)

    def preemptions(self) -> float:
        """All until now; vLLM tells of them before an answer that comes later."""
        return self.counted("vllm:num_preemptions_total")

    def counted(self, name: str) -> float:
        lines = httpx.get(f"{self.engine.url}/metrics", timeout=TIMEOUT_S).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def wait_until_stored(self) -> None:
        keys = [
            named.variant
            for prompt in PROMPTS
            for named in checked_segments(
                plan_exact(prompt, self.space, "public", "probe"), prompt.token_ids, self.space
            )
        ]
        client = StoreClient(self.store)
        deadline = time.monotonic() + TIMEOUT_S
        wants = [LookupKey.for_variant(key) for key in keys]
        while not all(found.stored for found in client.lookup(wants, TIMEOUT_S).variants):
            assert time.monotonic() < deadline, "not saved"
            time.sleep(0.05)
        client.close()


@pytest.fixture(scope="module")
def pressed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pressed]:
    folder = tmp_path_factory.mktemp("pressed")
    store = start_cachestore(folder / "store")
    engine = None
    try:
        engine = launch_engine(
            *(folder, tiny_model, store.address, *ENGINE_ARGUMENTS),
            max_length=2048,
            settings=COMPUTES_PLAIN,
        )
        wait_for_engine(engine)
        yield Pressed(store.address, engine, load_model_folder(str(tiny_model)).space("auto"))
    finally:
        if engine is not None:
            engine.service.stop()
        store.service.stop()


def agreed(found: list[Tokens], expected: list[Tokens]) -> int:
    """Tokens before the first that differs, of all answers together."""
    total = 0
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other) == NUM_TOKENS
        places = (place for place in range(NUM_TOKENS) if one[place] != other[place])
        total += next(places, NUM_TOKENS)
    return total


def pressed_by(pressed: Pressed, ask: Callable[[Prompt], T], prompts: Sequence[Prompt]) -> list[T]:
    """Answers of requests that came at once, of which some were preempted.

    Where this machine has kept them from each other's way for so long, they come once more.
    """
    for _ in range(6):
        before = pressed.preemptions()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(ask, prompts))
        if pressed.preemptions() > before:
            return answers
    raise AssertionError("no request was preempted")


def test_answers_of_preempted_requests_are_those_of_vllm(pressed: Pressed) -> None:
    """Preemption changes batches, and with them late tokens of plain vLLM, too: the control."""
    expected = [pressed.compute(prompt) for prompt in PROMPTS]
    control = pressed_by(pressed, pressed.compute, PROMPTS)
    saving = pressed_by(pressed, pressed.reuse, PROMPTS)
    pressed.wait_until_stored()
    loading = pressed_by(pressed, pressed.reuse, PROMPTS)
    wanted = agreed(control, expected)
    assert wanted > NUM_TOKENS
    assert agreed([tokens for tokens, _ in saving], expected) > wanted / 2
    assert agreed([tokens for tokens, _ in loading], expected) > wanted / 2
    # So those that were preempted had been.
    assert all(loaded > 0 for _, loaded in loading)


def test_blends_that_are_preempted_are_answered_as_vllm_would(pressed: Pressed) -> None:
    """Of chunks in another order, all of it mended, so that the answers are vLLM's own."""
    orders = ((2, 0, 3, 1), (3, 1, 0, 2), (1, 3, 2, 0), (2, 3, 1, 0))
    prompts = [make_prompt(seed, order) for seed, order in enumerate(orders)]
    expected = [pressed.compute(prompt) for prompt in prompts]
    control = pressed_by(pressed, pressed.compute, prompts)
    blended = pressed_by(pressed, pressed.blend, prompts)
    wanted = agreed(control, expected)
    assert wanted > NUM_TOKENS
    assert agreed([tokens for tokens, _ in blended], expected) > wanted / 2
    for prompt, (_, record) in zip(prompts, blended, strict=True):
        assert record.blended_tokens == record.recomputed_tokens == prompt.chunk_ends[-1] - HEAD


def test_an_engine_that_was_pressed_holds_nothing_back(pressed: Pressed) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(map(pressed.counted, gauges)):
        assert time.monotonic() < deadline, "blocks or requests are left"
        time.sleep(0.1)
    prompt = PROMPTS[0]
    tokens, loaded = pressed.reuse(prompt)
    assert loaded > 600
    assert agreed([tokens], [pressed.compute(prompt)]) > 0
