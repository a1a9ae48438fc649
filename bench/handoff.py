"""Measures when the store has a prompt's KV with and without the early copies of a prefill engine.

One engine copies layers out as they end (kv_producer), the other one after the pass (kv_both). Both
get new prompts in turn. Each prompt is one segment, and its KV is one value. The JSON has
milliseconds from the request to its first token, and from there until a lookup finds the value.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from pathlib import Path

from bench.support.program import is_quick, median_ms, print_figures
from bench.support.tiny_engines import TinyModel, start_all
from harness.completion import complete
from harness.processes import (
    COMPUTES_PLAIN,
    launch_engine,
    let_engines_sleep,
    running_cachestore,
)
from ragcache_core.plan.prompt import assemble
from ragcache_core.store_api import LookupKey
from ragcache_kv.store_client.client import StoreClient

ROLES = {"as_layers_end": "kv_producer", "after_the_pass": "kv_both"}
LENGTHS = (256, 2048)


def run(rounds: int, folder: Path) -> dict[str, object]:
    model = TinyModel(folder / "model", kv_heads=12)
    first: defaultdict[str, list[float]] = defaultdict(list)
    shows: defaultdict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(running_cachestore(folder / "store", memory_bytes=2 << 30))
        engines = {
            name: launch_engine(
                folder, model.folder, store.address, settings=COMPUTES_PLAIN, role=role
            )
            for name, role in ROLES.items()
        }
        start_all(stack, engines.values())
        client = StoreClient(store.address)
        stack.callback(client.close)
        for number in range(rounds + 1):
            for length in LENGTHS:
                for name in list(ROLES)[:: 1 if number % 2 else -1]:
                    prompt = assemble(model.ids(length), (), [1, 2])
                    plan = model.plan(prompt, None).encode()
                    [variant] = model.variants(prompt)
                    let_engines_sleep()
                    answer = complete(engines[name].url, prompt.token_ids, max_tokens=1, plan=plan)
                    ended = time.monotonic()
                    while not client.lookup([LookupKey.for_variant(variant)]).variants[0].stored:
                        pass
                    if number:  # the first round warms up
                        case = f"{name}_{length}"
                        shows[case].append(time.monotonic() - ended)
                        first[case].append(answer.ttft_s)
    whole = {case: [a + b for a, b in zip(first[case], shows[case], strict=True)] for case in first}
    return {
        **{
            f"{name}_ms": {
                case: {"median": median_ms(seconds), "min": median_ms([min(seconds)])}
                for case, seconds in cases.items()
            }
            for name, cases in (("first_token", first), ("shows", shows), ("whole", whole))
        },
        "rounds": rounds,
    }


def main() -> None:
    rounds = 3 if is_quick(__doc__, "3 rounds instead of 20") else 20
    print_figures(lambda folder: run(rounds, folder))


if __name__ == "__main__":
    main()
