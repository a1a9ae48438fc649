"""Time to first token with the KV of a prompt's chunks in the store, against computing it.

Cold: plain vLLM, without our connector and without its prefix cache. Warm: a fresh vLLM with our
connector, whose own cache is empty, so that all reused KV comes out of the store. Same prompts,
interleaved, medians. The greedy tokens of both must be equal, also where a stored value has been
corrupted on disk: that must be detected, counted by the store, and computed instead.
"""

from __future__ import annotations

import argparse
import asyncio
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

from bench.completion import Completion, complete
from bench.processes import (
    Engine,
    launch_engine,
    running_cachestore,
    running_engine,
    wait_for_engine,
)
from bench.stored_values import corrupt
from ragcache_core.keys import KVSpace, VariantKey
from ragcache_core.prompt import Prompt, assemble, plan_exact
from ragcache_core.reuse import checked_segments
from ragcache_kv.model_folder import load_model_folder
from ragcache_wire.cachestore_client import CacheStoreClient
from ragcache_wire.engine_client import EngineClient
from ragcache_wire.v1 import engine_pb2
from tests.tiny_model import make_tiny_model

DOMAIN = "public"
HEAD_TOKENS = 48
CHUNK_TOKENS = (256, 251, 240, 256, 197, 256, 249, 215)  # not multiples of a block, as in life
QUESTION_TOKENS = 32
ANSWER_TOKENS = 64


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
    return Warm(completion, asyncio.run(_record(engine, request)))


async def _record(engine: Engine, request: str) -> engine_pb2.RequestRecord:
    assert engine.records is not None
    client = EngineClient(engine.records)
    try:
        return await client.request_record(request)
    finally:
        await client.close()


def variants(prompt: Prompt, space: KVSpace) -> list[VariantKey]:
    """Keys of the prompt's exact chain."""
    plan = plan_exact(prompt, space, DOMAIN, "probe")
    return [named.variant for named in checked_segments(plan, prompt.token_ids, space)]


def wait_until_stored(address: str, keys: Sequence[VariantKey]) -> None:
    """Saving happens behind the answer; wait until all of it is in the store."""
    client = CacheStoreClient(address)
    deadline = time.monotonic() + 60
    while len(client.lookup(keys, timeout_s=5)) < len(keys):
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
        corrupt(folder / "store" / "data", variants(damaged, space)[3])
        store = stack.enter_context(running_cachestore(folder / "store"))
        wait_for_engine(plain)
        warm_engine = stack.enter_context(running_engine(folder, model, store.address))

        for _ in range(2):
            complete(plain.url, warm_up.token_ids, max_tokens=4)
            ask_warm(warm_engine, warm_up, space)
        cold_s, warm_s, shares, equal = [], [], [], []
        for index, prompt in enumerate(measured):
            cold = complete(plain.url, prompt.token_ids, max_tokens=ANSWER_TOKENS)
            warm = ask_warm(warm_engine, prompt, space)
            cold_s.append(cold.ttft_s)
            warm_s.append(warm.completion.ttft_s)
            shares.append(warm.record.loaded_tokens / len(prompt.token_ids))
            equal.append(cold.token_ids == warm.completion.token_ids)
            print(
                f"round {index + 1}: cold {cold.ttft_s * 1e3:.0f} ms, "
                f"warm {warm.completion.ttft_s * 1e3:.0f} ms "
                f"(load {warm.record.load_s * 1e3:.0f}, prefill {warm.record.prefill_s * 1e3:.0f}), "
                f"tokens {'equal' if equal[-1] else 'DIFFER'}",
                file=sys.stderr,
            )
        cold = complete(plain.url, damaged.token_ids, max_tokens=ANSWER_TOKENS)
        repaired = ask_warm(warm_engine, damaged, space)
        client = CacheStoreClient(store.address)
        corrupt_found = client.stats().corrupt
        client.close()
    return {
        "exact_tokens_equal": all(equal) and cold.token_ids == repaired.completion.token_ids,
        "hit_token_share": round(statistics.median(shares), 4),
        "ttft_cold_over_warm": round(statistics.median(cold_s) / statistics.median(warm_s), 2),
        "ttft_cold_ms": round(statistics.median(cold_s) * 1e3, 1),
        "ttft_warm_ms": round(statistics.median(warm_s) * 1e3, 1),
        "corrupt_values_detected": corrupt_found,
        "corrupt_hit_token_share": round(
            repaired.record.loaded_tokens / len(damaged.token_ids), 4
        ),
        "prompt_tokens": len(damaged.token_ids),
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
