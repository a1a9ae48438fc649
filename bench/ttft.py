"""Time to first token with the KV of a prompt's chunks in the store, against computing it.

Cold: plain vLLM, without our connector and without its prefix cache. Warm: a fresh vLLM with our
connector, whose own cache is empty, so that all reused KV comes out of the store. Same prompts,
interleaved, medians.

The greedy tokens must be those of vLLM with its own prefix cache, which computes the same tokens
over the same KV. Against a computation of the whole prompt they may differ late, for both alike:
matrix products of another height sum in another order on some processors
(``tokens_equal_to_cold`` and ``vllm_prefix_cache_equal_to_cold`` count how often). A value
corrupted on disk must be detected, counted by the store, and computed instead.
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
from tests.helpers.tiny_model import make_tiny_model

DOMAIN = "public"
HEAD_TOKENS = 48
CHUNK_TOKENS = (256, 251, 240, 256, 197, 256, 249, 167)
"""No multiples of a block, as in life. Only the whole context is one (1,920 = 15 x 128), so that
vLLM's own prefix cache, the control, leaves the same tokens to compute as the store does."""
QUESTION_TOKENS = 32
ANSWER_TOKENS = 64
DAMAGED = 3  # place of the variant that is damaged; 0 is the head


@dataclass(frozen=True, slots=True)
class Warm:
    """A completion with the engine's record of it."""

    completion: Completion
    record: engine_pb2.RequestRecord


def make_prompt(rng: random.Random, vocabulary: int) -> Prompt:
    """About 2,000 tokens: head, chunks, question."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    return assemble(ids(HEAD_TOKENS), [ids(count) for count in CHUNK_TOKENS], ids(QUESTION_TOKENS))


def ask_warm(engine: Engine, prompt: Prompt, space: KVSpace) -> Warm:
    """Complete with a plan that reuses everything stored, and fetch the engine's record."""
    request = uuid.uuid4().hex
    plan = plan_exact(prompt, space, DOMAIN, request).to_json()
    completion = complete(engine.url, prompt.token_ids, max_tokens=ANSWER_TOKENS, plan=plan)
    return Warm(completion, record_of(engine, request))


def ask_vllm_prefix_cache(engine: Engine, prompt: Prompt) -> Completion:
    """Complete without a plan over a prefix that vLLM computed and cached itself just before."""
    salt = uuid.uuid4().hex  # keeps what was loaded for the plan out of it
    complete(engine.url, prompt.token_ids, max_tokens=1, cache_salt=salt)
    return complete(engine.url, prompt.token_ids, max_tokens=ANSWER_TOKENS, cache_salt=salt)


def variants(prompt: Prompt, space: KVSpace) -> list[VariantKey]:
    """Keys of the prompt's exact chain."""
    plan = plan_exact(prompt, space, DOMAIN, "probe")
    return [named.variant for named in checked_segments(plan, prompt.token_ids, space)]


def wait_until_stored(address: str, keys: Sequence[VariantKey]) -> None:
    """Saving happens behind the answer; wait until all of it is in the store."""
    client = StoreClient(address)
    deadline = time.monotonic() + 60
    wants = [LookupKey.of(key) for key in keys]
    while not all(found.held for found in client.lookup(wants, timeout_s=5).variants):
        if time.monotonic() > deadline:
            raise RuntimeError("the engine did not save its chunk-caches within a minute")
        time.sleep(0.1)
    client.close()


def run(rounds: int, folder: Path) -> dict[str, object]:
    """Measure; returns the figures of the JSON line."""
    model = make_tiny_model(folder / "model", layers=12, hidden=768, heads=12, kv_heads=4)
    loaded = load_model_folder(str(model))
    space = loaded.space("auto")
    vocabulary = int(loaded.config["vocab_size"]) - 8
    rng = random.Random(uuid.uuid4().int)
    measured = [make_prompt(rng, vocabulary) for _ in range(rounds)]
    damaged, warm_up = make_prompt(rng, vocabulary), make_prompt(rng, vocabulary)

    with contextlib.ExitStack() as stack:
        # Both start while the store is filled; neither serves anything until it is needed.
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
        # Restarted, so that the warm engine's values come off the disk.
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
        repaired = ask_warm(warm_engine, damaged, space).record
        client = StoreClient(store.address)
        corrupt_found = client.stats().corrupt
        client.close()
    cold_s = statistics.median(run.ttft_s for run in cold_runs)
    warm_s = statistics.median(run.completion.ttft_s for run in warm_runs)
    length = len(damaged.token_ids)
    # Nothing from the damaged chunk on may have been loaded. (Tokens alone would not show a bit.)
    corrupt_was_computed = (
        corrupt_found >= 1 and repaired.loaded_tokens <= damaged.chunk_ends[DAMAGED - 2]
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
        "corrupt_tokens_loaded": repaired.loaded_tokens,
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
