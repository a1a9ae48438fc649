"""One engine computes a prompt, another goes on from there: real vLLM servers, a real store."""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bench.support.completion import Completion, complete, record_of
from bench.support.processes import (
    COMPUTES_PLAIN,
    CacheStore,
    Engine,
    launch_engine,
    start_cachestore,
    wait_for_engine,
)
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import Prompt, assemble, plan_exact
from ragcache_kv.model_folder import load_model_folder
from ragcache_wire.v1 import engine_pb2
from tests.helpers.miss_reasons import STORE_AWAY

pytestmark = pytest.mark.timeout(600)

# A prompt takes two whole passes and its last token alone, wherever and whenever it is computed;
# so all of them have the same KV and sums, to the last bit.
ENGINE_ARGUMENTS = ("--max-num-batched-tokens", "384")
LENGTH = 769
WAIT_S = "30"


def make_prompt(name: str) -> Prompt:
    rng = random.Random(name)

    def ids(count: int) -> list[int]:
        return [rng.randrange(350) for _ in range(count)]

    prompt = assemble(ids(41), [ids(131), ids(200), ids(77)], ids(320))
    assert len(prompt.token_ids) == LENGTH
    return prompt


@dataclass
class Halves:
    """A store, an engine that computes prompts and one that goes on with them."""

    store: CacheStore
    prefill: Engine
    decode: Engine
    space: KVSpace

    def compute(self, prompt: Prompt, request: str) -> None:
        self._ask(self.prefill, prompt, request, max_tokens=1)

    def go_on(self, prompt: Prompt, request: str) -> tuple[Completion, engine_pb2.RequestRecord]:
        answer = self._ask(self.decode, prompt, request, max_tokens=16)
        return answer, record_of(self.decode, request)

    def expected(self, prompt: Prompt) -> tuple[int, ...]:
        """Of one engine that does both: without a plan, so that it has nothing of the store."""
        return complete(self.prefill.url, prompt.token_ids, max_tokens=16).token_ids

    def _ask(self, engine: Engine, prompt: Prompt, request: str, max_tokens: int) -> Completion:
        plan = replace(plan_exact(prompt, self.space, "public", request), handoff=True)
        return complete(engine.url, prompt.token_ids, max_tokens=max_tokens, plan=plan.to_json())


@pytest.fixture(scope="module")
def halves(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Halves]:
    folder = tmp_path_factory.mktemp("halves")
    space = load_model_folder(str(tiny_model)).space("auto")
    settings = {**COMPUTES_PLAIN, "RAGCACHE_HANDOFF_WAIT_S": WAIT_S}
    with contextlib.ExitStack() as stack:
        store = start_cachestore(folder / "store")
        stack.callback(store.service.stop)
        engines = {}
        for role in ("kv_producer", "kv_consumer"):
            engines[role] = launch_engine(
                *(folder, tiny_model, store.address, *ENGINE_ARGUMENTS),
                settings=settings,
                role=role,
            )
            stack.callback(engines[role].service.stop)
            wait_for_engine(engines[role])
        yield Halves(store, engines["kv_producer"], engines["kv_consumer"], space)


def test_what_goes_on_elsewhere_is_what_one_engine_answers(halves: Halves) -> None:
    prompt = make_prompt("computed first")
    halves.compute(prompt, "one")
    answer, record = halves.go_on(prompt, "one")
    assert (record.loaded_tokens, record.miss) == (LENGTH - 1, "")
    assert answer.token_ids == halves.expected(prompt)


def test_an_engine_that_decodes_waits_for_one_that_has_not_even_begun(halves: Halves) -> None:
    prompt = make_prompt("asked first")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(halves.go_on, prompt, "two")
        halves.compute(prompt, "two")
        answer, record = asked.result()
    assert record.loaded_tokens == LENGTH - 1
    assert answer.token_ids == halves.expected(prompt)


def test_what_nobody_computes_is_computed_after_a_while(halves: Halves) -> None:
    prompt = make_prompt("nobody computes this")
    answer, record = halves.go_on(prompt, uuid.uuid4().hex)
    assert (record.loaded_tokens, record.miss) == (0, "handoff timed out")
    assert record.queue_s >= float(WAIT_S)
    assert answer.token_ids == halves.expected(prompt)


def test_a_store_that_dies_in_between_costs_the_computation(halves: Halves) -> None:
    """Last: it kills the store."""
    prompt = make_prompt("lost")
    halves.compute(prompt, "lost")
    halves.store.service.kill()
    answer, record = halves.go_on(prompt, "lost")
    assert record.loaded_tokens == 0
    assert record.miss in STORE_AWAY
    assert answer.token_ids == halves.expected(prompt)
