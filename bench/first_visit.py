"""What saving costs the first visitor, and what it spares him when chunks were precomputed.

Prompts whose chunks are all new, to three engines in turn: plain vLLM, another plain vLLM, and one
with our connector, which looks them up in vain, computes, and copies what it computed out to the
store. After each of these the bench waits until all of it is stored and observed, so that work
behind the answer falls on nobody else's time. ``excess_over_aa``: how much later the first token
comes than that of the two plain engines on average, beyond what these differ by; medians of ratios
within a round.

precomputed: the same prompts after each chunk was computed by itself right behind the template, as
ingest does when a collection asks for it; the first visitor then reuses them, a share recomputed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.blend_ttft import wait_until_observed
from bench.completion import complete
from bench.processes import Engine, launch_engine, running_cachestore, wait_for_engine
from ragcache_core.keys import KVSpace
from ragcache_core.prompt import Prompt, assemble, plan_blend
from ragcache_core.reuse import checked_segments
from ragcache_kv.model_folder import load_model_folder
from tests.tiny_model import make_tiny_model

DOMAIN = "public"
HEAD_TOKENS = 48
CHUNK_TOKENS = (256, 251, 197, 249)
QUESTION_TOKENS = 32
BUDGET = 0.15
ENGINES = ("plain", "plain_again", "connector")


class Visitor:
    """Asks with prompts that nobody has asked with."""

    def __init__(self, space: KVSpace, store: str, vocabulary: int) -> None:
        self._space = space
        self._store = store
        self._vocabulary = vocabulary
        self._rng = random.Random(uuid.uuid4().int)
        self._head = self._ids(HEAD_TOKENS)

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocabulary) for _ in range(count)]

    def new_chunks(self) -> list[list[int]]:
        """Chunks of nobody else's."""
        return [self._ids(count) for count in CHUNK_TOKENS]

    def prompt(self, chunks: list[list[int]]) -> Prompt:
        """A question about chunks."""
        return assemble(self._head, chunks, self._ids(QUESTION_TOKENS))

    def ask(self, engine: Engine, prompt: Prompt, *, wait: bool) -> float:
        """Seconds to the first token. wait: until all is stored; for an engine with a connector."""
        plan = plan_blend(prompt, self._space, DOMAIN, uuid.uuid4().hex, BUDGET)
        ours = engine.records is not None
        answer = complete(
            engine.url, prompt.token_ids, max_tokens=1, plan=plan.to_json() if ours else None
        )
        if wait:
            _, *chunks = checked_segments(plan, prompt.token_ids, self._space)
            wait_until_observed(self._store, [named.variant for named in chunks])
        return answer.ttft_s


def run(rounds: int, folder: Path) -> dict[str, object]:
    """Measure; returns the figures of the JSON line."""
    model = make_tiny_model(folder / "model", layers=12, hidden=768, heads=12, kv_heads=4)
    loaded = load_model_folder(str(model))
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(running_cachestore(folder / "store", memory_bytes=1 << 30))
        engines = {
            name: launch_engine(folder, model, store.address if name == "connector" else None)
            for name in ENGINES
        }
        for engine in engines.values():
            stack.callback(engine.service.stop)
        for engine in engines.values():
            wait_for_engine(engine)
        vocabulary = int(loaded.config["vocab_size"]) - 8
        visitor = Visitor(loaded.space("auto"), store.address, vocabulary)
        ours = engines["connector"]
        times: dict[str, list[float]] = {name: [] for name in (*ENGINES, "precomputed")}
        for number, names in enumerate(
            itertools.islice(itertools.cycle(itertools.permutations(ENGINES)), rounds + 1)
        ):
            chunks = visitor.new_chunks()
            prompt = visitor.prompt(chunks)
            took = {
                name: visitor.ask(engines[name], prompt, wait=name == "connector") for name in names
            }
            ready = visitor.new_chunks()
            for chunk in ready:
                visitor.ask(ours, visitor.prompt([chunk]), wait=True)
            took["precomputed"] = visitor.ask(ours, visitor.prompt(ready), wait=False)
            if number:  # the first one warms up
                for name, seconds in took.items():
                    times[name].append(seconds)
            shown = {name: f"{seconds * 1e3:.0f}" for name, seconds in took.items()}
            print(f"round {number}: {shown} ms", file=sys.stderr)
    pairs = list(zip(times["plain"], times["plain_again"], strict=True))
    aa = statistics.median(again / one for one, again in pairs) - 1
    excess = (
        statistics.median(
            ours_s / statistics.fmean(pair)
            for ours_s, pair in zip(times["connector"], pairs, strict=True)
        )
        - 1
    )
    spread = statistics.median(abs(again / one - 1) for one, again in pairs)
    precomputed = statistics.median(
        statistics.fmean(pair) / ours_s
        for ours_s, pair in zip(times["precomputed"], pairs, strict=True)
    )
    return {
        "excess_over_aa": round(max(0.0, excess - abs(aa)), 4),
        "excess": round(excess, 4),
        "aa": round(aa, 4),
        "aa_spread": round(spread, 4),
        "ttft_full_over_precomputed": round(precomputed, 2),
        "ms": {name: round(statistics.median(t) * 1e3, 1) for name, t in times.items()},
        "prompt_tokens": HEAD_TOKENS + sum(CHUNK_TOKENS) + QUESTION_TOKENS,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="6 rounds instead of 40")
    rounds = 6 if parser.parse_args().quick else 40
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(rounds, Path(folder))))


if __name__ == "__main__":
    main()
