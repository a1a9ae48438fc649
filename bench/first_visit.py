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

import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path

from bench.support.program import is_quick, median_ms, print_figures, rounded, say
from bench.support.tiny_engines import (
    HEAD_TOKENS,
    QUESTION_TOKENS,
    TinyModel,
    start_all,
    wait_until_stored,
)
from harness.completion import complete
from harness.processes import (
    COMPUTES_PLAIN,
    Engine,
    launch_engine,
    let_engines_sleep,
    running_cachestore,
)
from ragcache_core.plan.prompt import Prompt

CHUNK_TOKENS = (256, 251, 197, 249)
BUDGET = 0.15
ENGINES = ("plain", "plain_again", "connector")
ASKED = (*ENGINES, "without_plan")
"""The last one is also the engine with the connector."""

PRECOMPUTED_EVERY = 4
"""Rounds; one of them also has precomputed chunks."""

Times = dict[str, float]
"""Seconds to the first token, by engine."""


def one_start(rounds: int, folder: Path) -> Iterator[Times]:
    folder.mkdir()
    model = TinyModel(folder / "model")
    head = model.ids(HEAD_TOKENS)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(running_cachestore(folder / "store", memory_bytes=1 << 30))

        def ask(engine: Engine, prompt: Prompt, *, planned: bool, wait: bool = False) -> float:
            """Return the seconds to the first token; ``wait`` until everything is stored."""
            plan = model.plan(prompt, BUDGET).encode() if planned else None
            let_engines_sleep()
            answer = complete(engine.url, prompt.token_ids, max_tokens=1, plan=plan)
            if wait:
                chunks = model.variants(prompt, BUDGET)[1:]
                wait_until_stored(store.address, chunks, observed=True)
            return answer.ttft_s

        engines = {
            name: launch_engine(
                folder,
                model.folder,
                store.address if name == "connector" else None,
                settings=COMPUTES_PLAIN if name == "connector" else None,
            )
            for name in ENGINES
        }
        start_all(stack, engines.values())
        ours = engines["connector"]
        for number in range(rounds + 1):
            prompt = model.prompt(model.chunks(CHUNK_TOKENS), head)
            turn = number % len(ASKED)
            took = {}
            # Forward, then backward: each engine runs as often before as after each other one.
            for name in (ASKED[turn:] + ASKED[:turn])[:: 1 if number // len(ASKED) % 2 else -1]:
                if name == "without_plan":
                    # New tokens, because vLLM has those of the planned request in its prefix cache.
                    again = model.prompt(model.chunks(CHUNK_TOKENS), head)
                    took[name] = ask(ours, again, planned=False)
                else:
                    planned = name == "connector"
                    took[name] = ask(engines[name], prompt, planned=planned, wait=planned)
            if number % PRECOMPUTED_EVERY == 0:
                ready = model.chunks(CHUNK_TOKENS)
                for chunk in ready:
                    ask(ours, model.prompt([chunk], head), planned=True, wait=True)
                took["precomputed"] = ask(ours, model.prompt(ready, head), planned=True)
            say(f"round {number}: {rounded(took, 3)} s")
            if number:  # the first round warms up
                yield took


def run(starts: int, rounds: int, folder: Path) -> dict[str, object]:
    found = [took for number in range(starts) for took in one_start(rounds, folder / str(number))]
    plain = [statistics.fmean((took["plain"], took["plain_again"])) for took in found]
    pairs = list(zip(found, plain, strict=True))
    plain_ratios = [took["plain_again"] / took["plain"] for took in found]
    of_plan = [took["connector"] / took["without_plan"] for took in found]
    aa = statistics.median(plain_ratios) - 1
    excess = statistics.median(took["connector"] / one for took, one in pairs) - 1
    figures = {
        "excess_over_aa": max(0.0, excess - abs(aa)),
        "excess_less_aa": excess - abs(aa),
        "excess": excess,
        "excess_of_plan": statistics.median(of_plan) - 1,
        "excess_of_plan_spread": statistics.median(abs(one - 1) for one in of_plan),
        "aa": aa,
        "aa_spread": statistics.median(abs(one - 1) for one in plain_ratios),
        "ttft_full_over_precomputed": statistics.median(
            one / took["precomputed"] for took, one in pairs if "precomputed" in took
        ),
    }
    return rounded(figures) | {
        "ms": {
            name: median_ms(took[name] for took in found if name in took)
            for name in (*ASKED, "precomputed")
        },
        "prompt_tokens": HEAD_TOKENS + sum(CHUNK_TOKENS) + QUESTION_TOKENS,
        "rounds": rounds,
        "starts": starts,
    }


def main() -> None:
    quick = is_quick(__doc__, "1 start of 4 rounds, not 4 of 8")
    starts, rounds = (1, 4) if quick else (4, 8)
    print_figures(lambda folder: run(starts, rounds, folder))


if __name__ == "__main__":
    main()
