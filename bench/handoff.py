"""Measures when the store has a prompt's KV with and without the early copies of a prefill engine.

Run ``python -m bench.handoff [--quick]``. One engine copies layers out as they end (kv_producer),
the other one after the pass (kv_both). Both get new prompts in turn. Each prompt is one segment,
and its KV is one value. The JSON has milliseconds from the request to its first token, and from
there until a lookup finds the value.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
import uuid
from pathlib import Path

from bench.support.completion import complete
from bench.support.processes import (
    COMPUTES_PLAIN,
    launch_engine,
    let_engines_sleep,
    running_cachestore,
    wait_for_engine,
)
from ragcache_core.plan.prompt import assemble, plan_exact
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import LookupKey
from ragcache_kv.model_folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from tests.kit.model import make_tiny_model

ROLES = {"as_layers_end": "kv_producer", "after_the_pass": "kv_both"}
LENGTHS = (256, 2048)
DOMAIN = "public"


def run(rounds: int, folder: Path) -> dict[str, object]:
    """Measure and return the figures of the JSON line."""
    model = make_tiny_model(folder / "model", layers=12, hidden=768, heads=12, kv_heads=12)
    loaded = load_model_folder(str(model))
    vocabulary, space = int(loaded.config["vocab_size"]) - 8, loaded.space("auto")
    rng = random.Random(uuid.uuid4().int)
    first: dict[str, list[float]] = {}
    shows: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(running_cachestore(folder / "store", memory_bytes=2 << 30))
        engines = {}
        for name, role in ROLES.items():
            engines[name] = launch_engine(
                *(folder, model, store.address), settings=COMPUTES_PLAIN, role=role
            )
            stack.callback(engines[name].service.stop)
            wait_for_engine(engines[name])
        client = StoreClient(store.address)
        stack.callback(client.close)
        for number in range(rounds + 1):
            for length in LENGTHS:
                for name in list(ROLES)[:: 1 if number % 2 else -1]:
                    prompt = assemble(
                        [rng.randrange(vocabulary) for _ in range(length)], (), [1, 2]
                    )
                    plan = plan_exact(prompt, space, DOMAIN, uuid.uuid4().hex)
                    (named,) = checked_segments(plan, prompt.token_ids, space)
                    let_engines_sleep()
                    answer = complete(
                        engines[name].url, prompt.token_ids, max_tokens=1, plan=plan.encode()
                    )
                    ended = time.monotonic()
                    while (
                        not client.lookup([LookupKey.for_variant(named.variant)]).variants[0].stored
                    ):
                        pass
                    if number:  # the first round warms up
                        case = f"{name}_{length}"
                        shows.setdefault(case, []).append(time.monotonic() - ended)
                        first.setdefault(case, []).append(answer.ttft_s)
    return {
        "first_token_ms": {name: _ms(seconds) for name, seconds in first.items()},
        "shows_ms": {name: _ms(seconds) for name, seconds in shows.items()},
        "whole_ms": {
            name: _ms([a + b for a, b in zip(first[name], shows[name], strict=True)])
            for name in first
        },
        "rounds": rounds,
    }


def _ms(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(seconds) * 1e3, 1),
        "min": round(min(seconds) * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 20")
    rounds = 3 if parser.parse_args().quick else 20
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(rounds, Path(folder))))


if __name__ == "__main__":
    main()
