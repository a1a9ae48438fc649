"""Loads and repairs that are certain to be under way when their store dies or their client leaves.

Values are held up on their way, and a repair is given so many steps that it cannot have ended.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.support.completion import complete
from bench.support.processes import COMPUTES_PLAIN, launch_engine, start_cachestore, wait_for_engine
from ragcache_core.plan.prompt import Prompt, plan_blend, plan_exact
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_kv.model_folder import load_model_folder
from tests.helpers.clear_answers import is_clear
from tests.helpers.stalling_connection import StallingConnection
from tests.integration.engine.test_blend import HEAD_TOKENS, LENGTHS, prompt_of
from tests.integration.engine.test_vllm import Platform

pytestmark = pytest.mark.timeout(900)

WAIT_S = 60.0
BLOCK = 128
TOKEN_BYTES = 4 * 2 * 2 * 32 * 2
"""Layers, keys and values, KV heads, head_dim, bfloat16."""

# Of the head and the first chunk all comes, of the second one a part.
STALL_BYTES = (HEAD_TOKENS + LENGTHS[0]) * TOKEN_BYTES + LENGTHS[1] * TOKEN_BYTES // 2

AWAY = "store unavailable"


@dataclass
class Interrupted(Platform):
    """Beside a decoding request, a repair has one token in each step."""

    line: StallingConnection

    def until(self, condition: Callable[[], bool]) -> None:
        """Metrics come with a step of the engine after the one that counted."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            time.sleep(0.05)

    def failed(self, reason: str) -> float:
        """Loads that did, for this reason."""
        lines = self.metrics("ragcache_engine_load_failures_total")
        return sum(float(one.rsplit(" ", 1)[1]) for one in lines if f'reason="{reason}"' in one)

    def repairs(self) -> float:
        """That were begun and have ended, well or not."""
        lines = self.metrics("ragcache_engine_repair_seconds_count")
        return sum(float(one.rsplit(" ", 1)[1]) for one in lines)

    def blocks_are_free(self) -> bool:
        [line] = self.metrics("vllm:kv_cache_usage_perc")
        return float(line.rsplit(" ", 1)[1]) == 0

    def plan(self, kind: str, prompt: Prompt) -> ReusePlan:
        request = uuid.uuid4().hex
        if kind == "exact":
            return plan_exact(prompt, self.space, "public", request)
        return plan_blend(prompt, self.space, "public", request, 1.0)

    def answer(self, prompt: Prompt, plan: ReusePlan) -> tuple[int, ...]:
        """Under a salt of its own, so that what is held comes from the store."""
        return complete(
            self.engine.url,
            prompt.token_ids,
            max_tokens=2,
            plan=plan.to_json(),
            cache_salt=plan.request,
        ).token_ids

    @contextlib.contextmanager
    def asking(
        self, prompt: Prompt, plan: ReusePlan | None, max_tokens: int = 2
    ) -> Iterator[http.client.HTTPConnection]:
        """A client that leaves at the end of the block, without having waited for anything."""
        body: dict[str, Any] = {
            "model": "model",
            "prompt": list(prompt.token_ids),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "cache_salt": uuid.uuid4().hex,
        }
        if plan is not None:
            body["kv_transfer_params"] = {"ragcache": plan.to_json()}
        connection = http.client.HTTPConnection(urlsplit(self.engine.url).netloc, timeout=WAIT_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        try:
            yield connection
        finally:
            connection.close()


def clear_prompt(platform: Platform, *chunks: int) -> Prompt:
    """Whose answer does not hang on how sums are rounded."""
    prompts = (prompt_of(*chunks, question=f"interrupted {n}") for n in itertools.count())
    return next(prompt for prompt in prompts if is_clear(platform.engine.url, prompt, 2))


@pytest.fixture(scope="module")
def platform(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interrupted]:
    """A store that holds chunks of two prompts, and an engine at the other end of a line."""
    folder = tmp_path_factory.mktemp("interrupted")
    store = start_cachestore(folder / "store", shared=False)
    engine = None
    try:
        with StallingConnection.to(store.address) as line:
            engine = launch_engine(
                *(folder, tiny_model, line.address, "--max-num-batched-tokens", "384"),
                settings={
                    **COMPUTES_PLAIN,
                    "RAGCACHE_RECOMPUTE_SLICE_TOKENS": "1",
                    "RAGCACHE_LOAD_DEADLINE_S": str(WAIT_S),
                },
            )
            wait_for_engine(engine)
            space = load_model_folder(str(tiny_model)).space("auto")
            platform = Interrupted(folder, tiny_model, store, engine, space, line)
            for chunks in ((0, 1, 2), (3, 4, 5)):
                prompt = prompt_of(*chunks)
                platform.answer(prompt, platform.plan("blend", prompt))
                platform.wait_until_stored(prompt)
            yield platform
    finally:
        if engine is not None:
            engine.service.stop()
        store.service.stop()


@pytest.mark.parametrize(("kind", "chunks"), [("exact", (0, 1, 2)), ("blend", (0, 2, 1, 4))])
def test_a_client_that_leaves_during_a_load_ends_it(
    platform: Interrupted, kind: str, chunks: tuple[int, ...]
) -> None:
    prompt = clear_prompt(platform, *chunks)
    expected = platform.compute(prompt, max_tokens=2).token_ids
    cancelled, repairs = platform.failed("cancelled"), platform.repairs()
    left = platform.plan(kind, prompt)
    platform.line.stall(STALL_BYTES)
    with platform.asking(prompt, left):
        platform.line.wait_until_stalled()
    # It ends, and gives its blocks back, while the store still owes it values.
    platform.until(lambda: platform.failed("cancelled") == cancelled + 1)
    platform.until(lambda: not platform.unfinished_requests())
    platform.until(platform.blocks_are_free)
    assert platform.line.stalled == 1
    assert platform.repairs() == repairs
    record = platform.record(left.request)
    assert (record.loaded_tokens, record.blended_tokens, record.recomputed_tokens) == (0, 0, 0)
    assert record.load_s > 0
    platform.line.resume()
    again = platform.plan(kind, prompt)
    assert platform.answer(prompt, again) == expected
    assert platform.record(again.request).loaded_tokens == prompt.chunk_ends[-1]


def test_clients_that_leave_during_their_repairs_end_them(platform: Interrupted) -> None:
    """Beside a neighbour each takes a step for each token, and one is mended after the other."""
    prompt = clear_prompt(platform, 3, 2, 4, 0, 1)
    expected = platform.compute(prompt, max_tokens=2).token_ids
    to_mend = prompt.chunk_ends[-1] - HEAD_TOKENS - LENGTHS[3]
    for _ in range(5):
        cancelled, repairs = platform.failed("cancelled"), platform.repairs()
        first, *left = [platform.plan("blend", prompt) for _ in range(7)]
        with contextlib.ExitStack() as clients:
            clients.enter_context(platform.asking(prompt_of(), None, max_tokens=3500))
            asked = clients.enter_context(platform.asking(prompt, first))
            for plan in left:
                clients.enter_context(platform.asking(prompt, plan))
            # When one has its answer, and so is mended, the others have thousands of steps to go.
            assert asked.getresponse().status == 200
        platform.until(lambda: not platform.unfinished_requests())
        platform.until(platform.blocks_are_free)
        records = [platform.record(plan.request) for plan in left]
        ended = platform.repairs() - repairs - 1 - sum(one.recomputed_tokens > 0 for one in records)
        # Where this machine stands still for so long that all are mended, it is tried again.
        if ended > 0:
            break
    assert 0 < ended <= platform.failed("cancelled") - cancelled
    assert all(one.blended_tokens in (0, to_mend) for one in records)
    again = platform.plan("blend", prompt)
    assert platform.answer(prompt, again) == expected
    record = platform.record(again.request)
    assert (record.blended_tokens, record.recomputed_tokens) == (to_mend, to_mend)


def test_a_store_that_dies_during_loads_costs_recomputation(platform: Interrupted) -> None:
    """Last: it kills the store. What has come of a blend by then is used, the rest a repair's."""
    prompts = {
        "exact": clear_prompt(platform, 0, 1, 2),
        "blend": clear_prompt(platform, 2, 0, 4),
    }
    expected = {kind: platform.compute(p, max_tokens=2).token_ids for kind, p in prompts.items()}
    plans = {kind: platform.plan(kind, prompt) for kind, prompt in prompts.items()}
    failed = platform.failed(AWAY)
    platform.line.stall(STALL_BYTES)
    with ThreadPoolExecutor(2) as pool:
        asked = {k: pool.submit(platform.answer, prompts[k], plans[k]) for k in prompts}
        platform.line.wait_until_stalled(connections=2)
        platform.store.service.kill()
        platform.line.cut()
        assert {kind: one.result() for kind, one in asked.items()} == expected
    # A load that failed, and the two chunks that a blend was mended without.
    platform.until(lambda: platform.failed(AWAY) == failed + 3)
    exact, blend = (platform.record(plans[kind].request) for kind in ("exact", "blend"))
    assert exact.miss == AWAY
    # Whole blocks of what had come.
    assert exact.loaded_tokens == (HEAD_TOKENS + LENGTHS[0]) // BLOCK * BLOCK
    assert (exact.blended_tokens, exact.recomputed_tokens) == (0, 0)
    assert blend.miss == ""
    assert blend.loaded_tokens == prompts["blend"].chunk_ends[-1]
    context = sum(LENGTHS[n] for n in (2, 0, 4))
    assert (blend.blended_tokens, blend.recomputed_tokens) == (context, context)
    assert list(blend.missing_chunks) == [2, 3], "places of the plan's segments that never came"
    platform.until(platform.blocks_are_free)
    dead = platform.plan("blend", prompts["blend"])
    assert platform.answer(prompts["blend"], dead) == expected["blend"]
    record = platform.record(dead.request)
    assert (record.loaded_tokens, record.blended_tokens) == (0, 0)
