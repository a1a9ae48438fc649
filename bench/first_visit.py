"""Measures what saving costs the first request, and what precomputed chunks save it.

Prompts with new chunks go to three engines in turn: plain vLLM, a second plain vLLM, and one with
our connector. The connector looks the chunks up without a hit, computes them, and copies them to
the store. After each request the benchmark waits until everything is stored and observed, and
before each one until all engines sleep. Two starts of one program differ by several percent for
their whole life, so all three engines are started several times.

All figures are medians of ratios within a round, less 1. A negative one means that the connector
was faster.

- ``excess``: how much later the first token comes than the mean of the two plain engines.
- ``aa``: the second plain engine against the first; ``aa_spread``: their difference in a round.
- ``excess_less_aa``: the excess less the difference of the plain engines.
- ``excess_over_aa``: the same, clamped at 0.
- ``excess_of_plan``: the same engine with a plan against without one, when the connector does
  nothing; ``excess_of_plan_spread``: their difference in a round.

Only the first token is generated (``max_tokens`` 1). The effect of saving on
later tokens is not measured here.

``precomputed``: the same prompts after each chunk was computed right after the template, as ingest
does when a collection asks for it. The first request then reuses them with a share recomputed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.blend_ttft import wait_until_observed
from bench.support.completion import complete
from bench.support.processes import (
    COMPUTES_PLAIN,
    Engine,
    launch_engine,
    let_engines_sleep,
    running_cachestore,
    wait_for_engine,
)
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import Prompt, assemble, plan_blend
from ragcache_core.plan.segments import checked_segments
from ragcache_kv.model_folder import load_model_folder
from tests.kit.model import make_tiny_model

DOMAIN = "public"
HEAD_TOKENS = 48
CHUNK_TOKENS = (256, 251, 197, 249)
QUESTION_TOKENS = 32
BUDGET = 0.15
ENGINES = ("plain", "plain_again", "connector")
ASKED = (*ENGINES, "without_plan")
"""The last one is also the engine with the connector."""

PRECOMPUTED_EVERY = 4
"""Rounds; one of them also has precomputed chunks."""


class Visitor:
    """Sends prompts with new chunks."""

    def __init__(self, space: KVSpace, store: str, vocabulary: int) -> None:
        self._space = space
        self._store = store
        self._vocabulary = vocabulary
        self._rng = random.Random(uuid.uuid4().int)
        self._head = self._ids(HEAD_TOKENS)

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocabulary) for _ in range(count)]

    def new_chunks(self) -> list[list[int]]:
        """Return chunks that no other prompt has."""
        return [self._ids(count) for count in CHUNK_TOKENS]

    def prompt(self, chunks: list[list[int]]) -> Prompt:
        """Return a prompt of these chunks and a question."""
        return assemble(self._head, chunks, self._ids(QUESTION_TOKENS))

    def ask(self, engine: Engine, prompt: Prompt, *, planned: bool, wait: bool = False) -> float:
        """Return the seconds to the first token.

        ``planned`` adds a plan; ``wait`` waits until everything is stored.
        """
        plan = plan_blend(prompt, self._space, DOMAIN, uuid.uuid4().hex, BUDGET)
        let_engines_sleep()
        answer = complete(
            engine.url, prompt.token_ids, max_tokens=1, plan=plan.encode() if planned else None
        )
        if wait:
            _, *chunks = checked_segments(plan, prompt.token_ids, self._space)
            wait_until_observed(self._store, [named.variant for named in chunks])
        return answer.ttft_s


Times = dict[str, float]
"""Seconds to the first token, by engine."""


def one_start(rounds: int, folder: Path) -> Iterator[Times]:
    """Start all engines and measure this many rounds."""
    folder.mkdir()
    model = make_tiny_model(folder / "model", layers=12, hidden=768, heads=12, kv_heads=4)
    loaded = load_model_folder(str(model))
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(running_cachestore(folder / "store", memory_bytes=1 << 30))
        engines = {
            name: launch_engine(
                folder,
                model,
                store.address if name == "connector" else None,
                settings=COMPUTES_PLAIN if name == "connector" else None,
            )
            for name in ENGINES
        }
        for engine in engines.values():
            stack.callback(engine.service.stop)
        for engine in engines.values():
            wait_for_engine(engine)
        vocabulary = int(loaded.config["vocab_size"]) - 8
        visitor = Visitor(loaded.space("auto"), store.address, vocabulary)
        ours = engines["connector"]
        for number in range(rounds + 1):
            prompt = visitor.prompt(visitor.new_chunks())
            turn = number % len(ASKED)
            took = {}
            # Forward, then backward: each engine runs as often before as after each other one.
            for name in (ASKED[turn:] + ASKED[:turn])[:: 1 if number // len(ASKED) % 2 else -1]:
                if name == "without_plan":
                    # New tokens, because vLLM has those of the planned request in its prefix cache.
                    again = visitor.prompt(visitor.new_chunks())
                    took[name] = visitor.ask(ours, again, planned=False)
                else:
                    planned = name == "connector"
                    took[name] = visitor.ask(engines[name], prompt, planned=planned, wait=planned)
            if number % PRECOMPUTED_EVERY == 0:
                ready = visitor.new_chunks()
                for chunk in ready:
                    visitor.ask(ours, visitor.prompt([chunk]), planned=True, wait=True)
                took["precomputed"] = visitor.ask(ours, visitor.prompt(ready), planned=True)
            shown = {name: f"{seconds * 1e3:.0f}" for name, seconds in took.items()}
            print(f"round {number}: {shown} ms", file=sys.stderr)
            if number:  # the first round warms up
                yield took


def run(starts: int, rounds: int, folder: Path) -> dict[str, object]:
    """Measure and return the figures of the JSON line."""
    found = [took for number in range(starts) for took in one_start(rounds, folder / str(number))]
    plain = [statistics.fmean((took["plain"], took["plain_again"])) for took in found]
    aa = statistics.median(took["plain_again"] / took["plain"] for took in found) - 1
    excess = _median_ratio([took["connector"] for took in found], plain) - 1
    of_plan = [took["connector"] / took["without_plan"] for took in found]
    spread = statistics.median(abs(took["plain_again"] / took["plain"] - 1) for took in found)
    ready = [(took, one) for took, one in zip(found, plain, strict=True) if "precomputed" in took]
    return {
        "excess_over_aa": round(max(0.0, excess - abs(aa)), 4),
        "excess_less_aa": round(excess - abs(aa), 4),
        "excess": round(excess, 4),
        "excess_of_plan": round(statistics.median(of_plan) - 1, 4),
        "excess_of_plan_spread": round(statistics.median(abs(one - 1) for one in of_plan), 4),
        "aa": round(aa, 4),
        "aa_spread": round(spread, 4),
        "ttft_full_over_precomputed": round(
            statistics.median(one / took["precomputed"] for took, one in ready), 2
        ),
        "ms": {
            name: round(statistics.median(t[name] for t in found if name in t) * 1e3, 1)
            for name in (*ASKED, "precomputed")
        },
        "prompt_tokens": HEAD_TOKENS + sum(CHUNK_TOKENS) + QUESTION_TOKENS,
        "rounds": rounds,
        "starts": starts,
    }


def _median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1 start of 4 rounds, not 4 of 8")
    starts, rounds = (1, 4) if parser.parse_args().quick else (4, 8)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(starts, rounds, Path(folder))))


if __name__ == "__main__":
    main()
