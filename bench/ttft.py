"""Measures time to first token with a prompt's KV in the store against computing it.

Cold is plain vLLM without our connector and without its prefix cache. Warm is a fresh vLLM with our
connector and an empty cache of its own, so that all reused KV comes from the store. Prompts are the
same, rounds are interleaved, figures are medians.

The greedy tokens must equal those of vLLM with its own prefix cache, which computes the same tokens
over the same KV. They may differ from a computation of the whole prompt, for both alike: matrix
products of another height sum in another order on some processors. ``tokens_equal_to_cold`` and
``vllm_prefix_cache_equal_to_cold`` count that. A value that was corrupted on disk must be detected,
counted by the store, and computed instead.
"""

from __future__ import annotations

import contextlib
import statistics
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.support.program import is_quick, median_ms, print_figures, say
from bench.support.tiny_engines import (
    TinyModel,
    ask_vllm_prefix_cache,
    wait_until_stored,
)
from harness.completion import Completion, complete, record_of
from harness.processes import (
    COMPUTES_PLAIN,
    Engine,
    launch_engine,
    running_cachestore,
    running_engine,
    wait_for_engine,
)
from harness.stored_values import corrupt
from ragcache_core.plan.prompt import Prompt
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import engine_pb2

ANSWER_TOKENS = 64
DAMAGED = 3  # index of the damaged variant; 0 is the head


@dataclass(frozen=True, slots=True)
class Warm:
    """A completion with the engine's record."""

    completion: Completion
    record: engine_pb2.RequestRecord


def ask_warm(engine: Engine, prompt: Prompt, model: TinyModel) -> Warm:
    """Complete with a plan that reuses all stored KV, and fetch the engine's record."""
    request = uuid.uuid4().hex
    plan = model.plan(prompt, None, request).encode()
    completion = complete(engine.url, prompt.token_ids, max_tokens=ANSWER_TOKENS, plan=plan)
    return Warm(completion, record_of(engine, request))


def num_equal(some: Sequence[Completion], others: Sequence[Completion]) -> int:
    return sum(a.token_ids == b.token_ids for a, b in zip(some, others, strict=True))


def run(rounds: int, folder: Path) -> dict[str, object]:
    model = TinyModel(folder / "model")
    *measured, damaged, warm_up = (model.prompt(model.chunks()) for _ in range(rounds + 2))
    with contextlib.ExitStack() as stack:
        # Both start while the store is filled, and are not used before.
        plain = launch_engine(folder, model.folder, None, "--no-enable-prefix-caching")
        stack.callback(plain.service.stop)
        say("filling the store")
        with (
            running_cachestore(folder / "store") as store,
            running_engine(folder, model.folder, store.address) as filler,
        ):
            for prompt in [*measured, damaged]:
                ask_warm(filler, prompt, model)
                wait_until_stored(store.address, model.variants(prompt))
        # A restart makes the warm engine's values come from disk.
        corrupt(folder / "store" / "data", model.variants(damaged)[DAMAGED])
        store = stack.enter_context(running_cachestore(folder / "store"))
        wait_for_engine(plain)
        engine = stack.enter_context(
            running_engine(folder, model.folder, store.address, settings=COMPUTES_PLAIN)
        )
        for _ in range(2):
            complete(plain.url, warm_up.token_ids, max_tokens=4)
            ask_warm(engine, warm_up, model)
        cold, warm, controls = [], [], []
        for index, prompt in enumerate(measured):
            cold.append(complete(plain.url, prompt.token_ids, max_tokens=ANSWER_TOKENS))
            warm.append(ask_warm(engine, prompt, model))
            controls.append(ask_vllm_prefix_cache(engine, prompt, ANSWER_TOKENS))
            say(f"round {index + 1} of {rounds}")
        recomputed = ask_warm(engine, damaged, model).record
        client = StoreClient(store.address)
        corrupt_found = client.stats().corrupt
        client.close()
    completions = [one.completion for one in warm]
    cold_ms, warm_ms, control_ms = (
        median_ms(one.ttft_s for one in found) for found in (cold, completions, controls)
    )
    length = len(damaged.token_ids)
    # No chunk from the damaged one on may be loaded; tokens alone would not show one bit.
    corrupt_was_computed = (
        corrupt_found >= 1 and recomputed.loaded_tokens <= damaged.chunk_ends[DAMAGED - 2]
    )
    return {
        "exact_tokens_equal": corrupt_was_computed and num_equal(completions, controls) == rounds,
        "hit_token_share": round(
            statistics.median(one.record.loaded_tokens for one in warm) / length, 4
        ),
        "ttft_cold_over_warm": round(cold_ms / warm_ms, 2),
        "ttft_cold_ms": cold_ms,
        "ttft_warm_ms": warm_ms,
        "ttft_vllm_prefix_cache_ms": control_ms,
        "tokens_equal_to_cold": num_equal(completions, cold),
        "vllm_prefix_cache_equal_to_cold": num_equal(controls, cold),
        "corrupt_values_detected": corrupt_found,
        "corrupt_tokens_loaded": recomputed.loaded_tokens,
        "prompt_tokens": length,
        "rounds": rounds,
    }


def main() -> None:
    rounds = 5 if is_quick(__doc__, "5 rounds instead of 25") else 25
    print_figures(lambda folder: run(rounds, folder))


if __name__ == "__main__":
    main()
