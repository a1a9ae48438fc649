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

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.support.completion import Completion, complete, record_of
from bench.support.processes import (
    COMPUTES_PLAIN,
    Engine,
    launch_engine,
    running_cachestore,
    running_engine,
    wait_for_engine,
)
from bench.support.stored_values import corrupt
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.plan.prompt import Prompt, assemble, plan_exact
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import LookupKey
from ragcache_kv.model_folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import engine_pb2
from tests.kit.model import make_tiny_model

DOMAIN = "public"
HEAD_TOKENS = 48
CHUNK_TOKENS = (256, 251, 240, 256, 197, 256, 249, 167)
"""Chunk sizes are no multiples of a block, as in practice. The whole context is one (1,920 = 15 x
128), so that vLLM's prefix cache, the control, leaves the same tokens to compute as the store."""
QUESTION_TOKENS = 32
ANSWER_TOKENS = 64
DAMAGED = 3  # index of the damaged variant; 0 is the head


@dataclass(frozen=True, slots=True)
class Warm:
    """A completion with the engine's record."""

    completion: Completion
    record: engine_pb2.RequestRecord


def make_prompt(rng: random.Random, vocabulary: int) -> Prompt:
    """Make a prompt of about 2,000 tokens: head, chunks, question."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    return assemble(ids(HEAD_TOKENS), [ids(count) for count in CHUNK_TOKENS], ids(QUESTION_TOKENS))


def ask_warm(engine: Engine, prompt: Prompt, space: KVSpace) -> Warm:
    """Complete with a plan that reuses all stored KV, and fetch the engine's record."""
    request = uuid.uuid4().hex
    plan = plan_exact(prompt, space, DOMAIN, request).encode()
    completion = complete(engine.url, prompt.token_ids, max_tokens=ANSWER_TOKENS, plan=plan)
    return Warm(completion, record_of(engine, request))


def ask_vllm_prefix_cache(engine: Engine, prompt: Prompt) -> Completion:
    """Complete without a plan over a prefix that vLLM has just computed and cached."""
    salt = uuid.uuid4().hex  # excludes blocks that were loaded for the plan
    complete(engine.url, prompt.token_ids, max_tokens=1, cache_salt=salt)
    return complete(engine.url, prompt.token_ids, max_tokens=ANSWER_TOKENS, cache_salt=salt)


def variants(prompt: Prompt, space: KVSpace) -> list[VariantKey]:
    """Return the keys of the prompt's exact chain."""
    plan = plan_exact(prompt, space, DOMAIN, "probe")
    return [named.variant for named in checked_segments(plan, prompt.token_ids, space)]


def wait_until_stored(address: str, keys: Sequence[VariantKey]) -> None:
    """Wait until the store has everything; saves follow the answer."""
    client = StoreClient(address)
    deadline = time.monotonic() + 60
    wants = [LookupKey.for_variant(key) for key in keys]
    while not all(found.stored for found in client.lookup(wants, timeout_s=5).variants):
        if time.monotonic() > deadline:
            raise RuntimeError("the engine did not save its variants within a minute")
        time.sleep(0.1)
    client.close()


def run(rounds: int, folder: Path) -> dict[str, object]:
    """Measure and return the figures of the JSON line."""
    model = make_tiny_model(folder / "model", layers=12, hidden=768, heads=12, kv_heads=4)
    loaded = load_model_folder(str(model))
    space = loaded.space("auto")
    vocabulary = int(loaded.config["vocab_size"]) - 8
    rng = random.Random(uuid.uuid4().int)
    measured = [make_prompt(rng, vocabulary) for _ in range(rounds)]
    damaged, warm_up = make_prompt(rng, vocabulary), make_prompt(rng, vocabulary)

    with contextlib.ExitStack() as stack:
        # Both start while the store is filled, and are not used before.
        plain = launch_engine(folder, model, None, "--no-enable-prefix-caching")
        stack.callback(plain.service.stop)
        print("filling the store", file=sys.stderr)
        with (
            running_cachestore(folder / "store") as store,
            running_engine(folder, model, store.address) as filler,
        ):
            for prompt in [*measured, damaged]:
                ask_warm(filler, prompt, space)
                wait_until_stored(store.address, variants(prompt, space))
        # A restart makes the warm engine's values come from disk.
        corrupt(folder / "store" / "data", variants(damaged, space)[DAMAGED])
        store = stack.enter_context(running_cachestore(folder / "store"))
        wait_for_engine(plain)
        warm_engine = stack.enter_context(
            running_engine(folder, model, store.address, settings=COMPUTES_PLAIN)
        )

        for _ in range(2):
            complete(plain.url, warm_up.token_ids, max_tokens=4)
            ask_warm(warm_engine, warm_up, space)
        cold_runs, warm_runs, controls = [], [], []
        for index, prompt in enumerate(measured):
            cold_runs.append(complete(plain.url, prompt.token_ids, max_tokens=ANSWER_TOKENS))
            warm = ask_warm(warm_engine, prompt, space)
            warm_runs.append(warm)
            controls.append(ask_vllm_prefix_cache(warm_engine, prompt))
            print(
                f"round {index + 1}: cold {cold_runs[-1].ttft_s * 1e3:.0f} ms, "
                f"warm {warm.completion.ttft_s * 1e3:.0f} ms "
                f"(load {warm.record.load_s * 1e3:.0f}, "
                f"prefill {warm.record.prefill_s * 1e3:.0f}), "
                f"vLLM's prefix cache {controls[-1].ttft_s * 1e3:.0f} ms",
                file=sys.stderr,
            )
        recomputed = ask_warm(warm_engine, damaged, space).record
        client = StoreClient(store.address)
        corrupt_found = client.stats().corrupt
        client.close()
    cold_s = statistics.median(run.ttft_s for run in cold_runs)
    warm_s = statistics.median(run.completion.ttft_s for run in warm_runs)
    length = len(damaged.token_ids)
    # No chunk from the damaged one on may be loaded; tokens alone would not show one bit.
    corrupt_was_computed = (
        corrupt_found >= 1 and recomputed.loaded_tokens <= damaged.chunk_ends[DAMAGED - 2]
    )
    return {
        "exact_tokens_equal": corrupt_was_computed
        and all(
            warm.completion.token_ids == control.token_ids
            for warm, control in zip(warm_runs, controls, strict=True)
        ),
        "hit_token_share": round(
            statistics.median(warm.record.loaded_tokens for warm in warm_runs) / length, 4
        ),
        "ttft_cold_over_warm": round(cold_s / warm_s, 2),
        "ttft_cold_ms": round(cold_s * 1e3, 1),
        "ttft_warm_ms": round(warm_s * 1e3, 1),
        "ttft_vllm_prefix_cache_ms": round(
            statistics.median(control.ttft_s for control in controls) * 1e3, 1
        ),
        "tokens_equal_to_cold": sum(
            warm.completion.token_ids == cold.token_ids
            for warm, cold in zip(warm_runs, cold_runs, strict=True)
        ),
        "vllm_prefix_cache_equal_to_cold": sum(
            control.token_ids == cold.token_ids
            for control, cold in zip(controls, cold_runs, strict=True)
        ),
        "corrupt_values_detected": corrupt_found,
        "corrupt_tokens_loaded": recomputed.loaded_tokens,
        "prompt_tokens": length,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 25")
    rounds = 5 if parser.parse_args().quick else 25
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(rounds, Path(folder))))


if __name__ == "__main__":
    main()
