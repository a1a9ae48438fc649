"""An engine with too few blocks for its requests, which it preempts, gives right answers."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from harness.completion import complete, record_of
from harness.plans import blend_for_all, exact_for_all
from harness.processes import (
    COMPUTES_PLAIN,
    Engine,
    running_cachestore,
    running_engine,
)
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import Prompt, assemble
from ragcache_core.plan.segments import checked_segments
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.v1 import engine_pb2
from tests.kit.engine import is_stored, samples, total
from tests.kit.wait import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT_S = 120.0
NUM_TOKENS = 900
TEMPLATE = 41
# 17 blocks of 128 tokens, and one that stays free. A prompt takes six blocks, and up to thirteen
# with its answer. So of two requests that start together, vLLM preempts one.
ENGINE_ARGUMENTS = ("--num-gpu-blocks-override", "18", "--max-num-batched-tokens", "384")

Tokens = tuple[int, ...]
T = TypeVar("T")


def make_prompt(seed: int, order: Sequence[int] = (0, 1, 2, 3)) -> Prompt:
    """Return a prompt with the seed's chunks in this order, after the same template."""
    rng = random.Random(f"pressure {seed}")

    def ids(count: int) -> list[int]:
        return [rng.randrange(350) for _ in range(count)]

    head, chunks = ids(TEMPLATE), [ids(131), ids(200), ids(177), ids(91)]
    return assemble(head, [chunks[number] for number in order], ids(23))


PROMPTS = [make_prompt(seed) for seed in range(4)]


@dataclass
class Pressed:
    """A store, and an engine with too few blocks for concurrent requests."""

    store: str
    engine: Engine
    space: KVSpace

    def compute(self, prompt: Prompt) -> Tokens:
        """Compute with vLLM alone, without a plan."""
        salt = uuid.uuid4().hex
        return complete(
            self.engine.url, prompt.token_ids, max_tokens=NUM_TOKENS, cache_salt=salt
        ).token_ids

    def reuse(self, prompt: Prompt) -> tuple[Tokens, int]:
        """Ask with a plan and without vLLM's prefix cache. Also return the loaded tokens."""
        request = uuid.uuid4().hex
        answer = complete(
            self.engine.url,
            prompt.token_ids,
            max_tokens=NUM_TOKENS,
            plan=exact_for_all(prompt, self.space, "public", request).encode(),
            cache_salt=request,
        )
        return answer.token_ids, record_of(self.engine, request).loaded_tokens

    def blend(self, prompt: Prompt) -> tuple[Tokens, engine_pb2.RequestRecord]:
        """Ask for a fully recomputed blend. Also return its record."""
        request = uuid.uuid4().hex
        answer = complete(
            self.engine.url,
            prompt.token_ids,
            max_tokens=NUM_TOKENS,
            plan=blend_for_all(prompt, self.space, "public", request, 1.0).encode(),
            cache_salt=request,
        )
        return answer.token_ids, record_of(self.engine, request)

    def preemptions(self) -> float:
        """Return the number so far. vLLM reports them before later answers."""
        return self.counted("vllm:num_preemptions_total")

    def counted(self, name: str) -> float:
        return total(samples(self.engine.url, name))

    def wait_until_stored(self) -> None:
        keys = [
            named.variant
            for prompt in PROMPTS
            for named in checked_segments(
                exact_for_all(prompt, self.space, "public", "probe"), prompt.token_ids, self.space
            )
        ]
        wait_until(lambda: is_stored(self.store, keys), "not saved")


@pytest.fixture(scope="module")
def pressed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pressed]:
    folder = tmp_path_factory.mktemp("pressed")
    space = load_model_folder(str(tiny_model)).space("auto")
    with running_cachestore(folder / "store") as store:
        arguments = (folder, tiny_model, store.address, *ENGINE_ARGUMENTS)
        with running_engine(*arguments, max_length=2048, settings=COMPUTES_PLAIN) as engine:
            yield Pressed(store.address, engine, space)


def count_agreeing(found: list[Tokens], expected: list[Tokens]) -> int:
    """Return how many tokens agree before the first difference, over all answers."""
    total = 0
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other) == NUM_TOKENS
        differences = (i for i in range(NUM_TOKENS) if one[i] != other[i])
        total += next(differences, NUM_TOKENS)
    return total


def ask_until_preempted(
    pressed: Pressed, ask: Callable[[Prompt], T], prompts: Sequence[Prompt]
) -> list[T]:
    """Ask concurrently, until vLLM preempts a request. Return the answers."""
    for _ in range(6):
        before = pressed.preemptions()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(ask, prompts))
        if pressed.preemptions() > before:
            return answers
    raise AssertionError("no request was preempted")


def test_preempted_requests_get_vllms_answers(pressed: Pressed) -> None:
    """Preemption changes batches, which also changes later tokens of plain vLLM (the control)."""
    expected = [pressed.compute(prompt) for prompt in PROMPTS]
    control = ask_until_preempted(pressed, pressed.compute, PROMPTS)
    saving = ask_until_preempted(pressed, pressed.reuse, PROMPTS)
    pressed.wait_until_stored()
    loading = ask_until_preempted(pressed, pressed.reuse, PROMPTS)
    num_control = count_agreeing(control, expected)
    assert num_control > NUM_TOKENS
    assert count_agreeing([tokens for tokens, _ in saving], expected) > num_control / 2
    assert count_agreeing([tokens for tokens, _ in loading], expected) > num_control / 2
    # So the preempted requests had loaded tokens, too.
    assert all(loaded > 0 for _, loaded in loading)


def test_preempted_blends_get_vllms_answers(pressed: Pressed) -> None:
    """Blends of reordered chunks, fully recomputed, so that the answers are vLLM's own."""
    orders = ((2, 0, 3, 1), (3, 1, 0, 2), (1, 3, 2, 0), (2, 3, 1, 0))
    prompts = [make_prompt(seed, order) for seed, order in enumerate(orders)]
    expected = [pressed.compute(prompt) for prompt in prompts]
    control = ask_until_preempted(pressed, pressed.compute, prompts)
    blended = ask_until_preempted(pressed, pressed.blend, prompts)
    num_control = count_agreeing(control, expected)
    assert num_control > NUM_TOKENS
    assert count_agreeing([tokens for tokens, _ in blended], expected) > num_control / 2
    for prompt, (_, record) in zip(prompts, blended, strict=True):
        assert record.blended_tokens == record.recomputed_tokens == prompt.chunk_ends[-1] - TEMPLATE


def test_no_blocks_or_requests_are_left(pressed: Pressed) -> None:
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    wait_until(lambda: not any(map(pressed.counted, gauges)), "blocks or requests are left")
    prompt = PROMPTS[0]
    tokens, loaded = pressed.reuse(prompt)
    assert loaded > 600
    assert count_agreeing([tokens], [pressed.compute(prompt)]) > 0
