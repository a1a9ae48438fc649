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

from harness.completion import Completion, complete, record_of
from harness.plans import blend_for_all, exact_for_all
from harness.processes import (
    COMPUTES_PLAIN,
    CacheStore,
    Engine,
    launch_engine,
    start_cachestore,
    wait_for_engine,
)
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import Prompt, assemble
from ragcache_core.plan.reuse_plan import Handoff
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.v1 import engine_pb2
from tests.kit.engine import STORE_AWAY

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

# A prompt takes two whole passes and its last token alone, wherever and whenever it is computed;
# so all of them have the same KV and sums, to the last bit.
ENGINE_ARGUMENTS = ("--max-num-batched-tokens", "384")
LENGTH = 769
WAIT_S = 30.0


def make_prompt(name: str) -> Prompt:
    rng = random.Random(name)

    def ids(count: int) -> list[int]:
        return [rng.randrange(350) for _ in range(count)]

    prompt = assemble(ids(41), [ids(131), ids(200), ids(77)], ids(320))
    assert len(prompt.token_ids) == LENGTH
    return prompt


@dataclass
class HandoffPair:
    """A store, an engine that computes prompts, and one that decodes them."""

    store: CacheStore
    prefill: Engine
    decode: Engine
    space: KVSpace

    def compute(self, prompt: Prompt, request: str) -> None:
        self._ask(self.prefill, prompt, request, Handoff.PREFILL)

    def decode_answer(
        self, prompt: Prompt, request: str
    ) -> tuple[Completion, engine_pb2.RequestRecord]:
        answer = self._ask(self.decode, prompt, request, Handoff.DECODE)
        return answer, record_of(self.decode, request)

    def expected(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the answer of one engine alone, without a plan and so without the store."""
        return complete(self.prefill.url, prompt.token_ids, max_tokens=16).token_ids

    def _ask(self, engine: Engine, prompt: Prompt, request: str, part: Handoff) -> Completion:
        plan = exact_for_all(prompt, self.space, "public", request)
        plan = replace(plan, handoff=part, handoff_wait_s=WAIT_S)
        max_tokens = 1 if part is Handoff.PREFILL else 16
        return complete(engine.url, prompt.token_ids, max_tokens=max_tokens, plan=plan.encode())


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandoffPair]:
    folder = tmp_path_factory.mktemp("pair")
    space = load_model_folder(str(tiny_model)).space("auto")
    with contextlib.ExitStack() as stack:
        store = start_cachestore(folder / "store")
        stack.callback(store.service.stop)
        engines = []
        for _ in range(2):
            engine = launch_engine(
                folder, tiny_model, store.address, *ENGINE_ARGUMENTS, settings=COMPUTES_PLAIN
            )
            stack.callback(engine.service.stop)
            wait_for_engine(engine)
            engines.append(engine)
        prefill, decode = engines
        yield HandoffPair(store, prefill, decode, space)


def test_a_handed_off_prompt_has_the_answer_of_one_engine(pair: HandoffPair) -> None:
    prompt = make_prompt("computed first")
    pair.compute(prompt, "one")
    answer, record = pair.decode_answer(prompt, "one")
    assert (record.loaded_tokens, record.miss) == (LENGTH - 1, "")
    assert answer.token_ids == pair.expected(prompt)


def test_a_decoding_engine_waits_for_a_prefill_that_has_not_started(pair: HandoffPair) -> None:
    prompt = make_prompt("asked first")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.decode_answer, prompt, "two")
        pair.compute(prompt, "two")
        answer, record = asked.result()
    assert record.loaded_tokens == LENGTH - 1
    assert answer.token_ids == pair.expected(prompt)


def test_a_decoding_engine_computes_after_the_handoff_wait(pair: HandoffPair) -> None:
    prompt = make_prompt("without a prefill")
    answer, record = pair.decode_answer(prompt, uuid.uuid4().hex)
    assert (record.loaded_tokens, record.miss) == (0, "handoff timed out")
    assert record.prefill_s >= WAIT_S
    assert answer.token_ids == pair.expected(prompt)


def test_what_one_engine_has_blended_another_one_decodes(pair: HandoffPair) -> None:
    head, chunks, question = range(41), [range(50, 181), range(200, 300), range(100, 240)], [7] * 90
    pair.compute(assemble(head, chunks, question), "stored")
    prompt = assemble(head, chunks[::-1], question)
    plan = blend_for_all(prompt, pair.space, "public", "blend", 0.2)

    def handed_off(part: Handoff, max_tokens: int) -> Completion:
        text = replace(plan, handoff=part, handoff_wait_s=WAIT_S).encode()
        engine = pair.prefill if part is Handoff.PREFILL else pair.decode
        return complete(engine.url, prompt.token_ids, max_tokens=max_tokens, plan=text)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(handed_off, Handoff.DECODE, 16)
        handed_off(Handoff.PREFILL, 1)
        answer = asked.result()
    blended, decoded = record_of(pair.prefill, "blend"), record_of(pair.decode, "blend")
    assert blended.blended_tokens > 0
    assert blended.recomputed_tokens > 0
    assert (decoded.loaded_tokens, decoded.miss) == (len(prompt.token_ids) - 1, "")
    assert (decoded.blended_tokens, decoded.recomputed_tokens) == (len(prompt.token_ids) - 1, 0)
    assert len(answer.token_ids) == 16
    exact = exact_for_all(prompt, pair.space, "public", "exact")
    complete(pair.decode.url, prompt.token_ids, max_tokens=1, plan=exact.encode())
    head_only = record_of(pair.decode, "exact")
    assert head_only.local_tokens + head_only.loaded_tokens <= len(head), "no blend serves exact"


def test_a_store_that_dies_before_the_decode_costs_the_computation(pair: HandoffPair) -> None:
    """Last, as it kills the store."""
    prompt = make_prompt("lost")
    pair.compute(prompt, "lost")
    pair.store.service.kill()
    answer, record = pair.decode_answer(prompt, "lost")
    assert record.loaded_tokens == 0
    assert record.miss in STORE_AWAY
    assert answer.token_ids == pair.expected(prompt)
