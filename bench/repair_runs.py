"""What a repair takes by the length of the runs that its tokens are laid in.

A run of consecutive tokens is one pseudo-request of vLLM's attention
(``ragcache_engine.blend.recomputer``), so that long runs are fewer rows for the same tokens. The model
has random weights and is large enough for passes to be what takes the time; prompts and chunks are
those of ``bench/blend_ttft.py``, captured behind others in a worker of vLLM's, without a server.
Of each prompt SHARE of its tokens is recomputed as an engine would with nothing else to do, in runs
of one length after another, interleaved and in random order; on a CPU by one thread. "one" is a
single run of all of them in the middle of the prompt: about as much as there is to save.

Figures are medians over rounds, ``over_scattered`` of ratios to runs of one token in the same
round. Both are by token, for up to a run less one of a budget stays unspent. ``choice_ms`` is what
it takes to put tokens in order and lay runs. ``bench/blend_quality.py`` has what answers are worth
then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.blend_quality import NEIGHBOURS, RUN_TOKENS, Case, Lab, Trial, make_engine
from bench.blend_ttft import Scene
from ragcache_core.blend.recomputation import budget_tokens
from ragcache_core.blend.slices import slices
from tests.helpers.tiny_model import make_tiny_model

SHARE = 0.15
PROMPTS, ROUNDS = 6, 12
WARM_UP = 2
SEED = 1
ONE = "one"


def work(worker: Any, model: Path, vocabulary: int, prompts: int, rounds: int) -> dict[str, object]:
    """Measure; returns the figures of the JSON line."""
    rng = Random(SEED)
    lab = Lab(worker, model, -1)
    scene = Scene.make(rng, vocabulary, 1)
    others = [ids for chunks in scene.chunks for ids in chunks]
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    choosing: defaultdict[str, list[float]] = defaultdict(list)
    counts: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    length = 0
    for number in range(prompts):
        case = Case(None, scene.head, scene.chunks[number % len(scene.chunks)], scene.question)
        captured = [
            lab.capture(case.head, rng.sample(others, rng.randint(*NEIGHBOURS)), ids)
            for ids in case.chunks
        ]
        trial = Trial(lab, case, captured, rng)
        budget = budget_tokens(SHARE, trial.context_tokens)
        middle = (trial.end - budget) // 2
        ways: dict[str, Sequence[range]] = {ONE: [range(middle, middle + budget)]}
        for run_tokens in RUN_TOKENS:
            began = time.perf_counter()
            ways[str(run_tokens)] = trial.ours(budget, run_tokens)
            choosing[str(run_tokens)].append(time.perf_counter() - began)
        for name, runs in ways.items():
            counts[name].append((len(runs), sum(map(len, runs))))
        length = len(trial.token_ids)
        for done in range(WARM_UP + rounds):
            for name in rng.sample(list(ways), len(ways)):
                taken = repair_s(trial, ways[name])
                if done >= WARM_UP:
                    seconds[name].append(taken / counts[name][-1][1])
        print(f"prompt {number + 1} of {prompts}", file=sys.stderr)

    def medians(values: dict[str, list[float]], scale: float, digits: int) -> dict[str, float]:
        return {k: round(statistics.median(v) * scale, digits) for k, v in values.items()}

    names = [*map(str, RUN_TOKENS), ONE]
    scattered = seconds[names[0]]
    ratios = {
        name: [a / b for a, b in zip(seconds[name], scattered, strict=True)] for name in names
    }
    return {
        "over_scattered": medians(ratios, 1, 3),
        "us_per_token": medians({name: seconds[name] for name in names}, 1e6, 1),
        "choice_ms": medians(choosing, 1e3, 2),
        "runs": {name: round(statistics.mean(r for r, _ in counts[name]), 1) for name in names},
        "tokens": {name: round(statistics.mean(t for _, t in counts[name]), 1) for name in names},
        "prompt_tokens": length,
        "prompts": prompts,
        "rounds": rounds,
    }


def repair_s(trial: Trial, runs: Sequence[range]) -> float:
    """Seconds that it takes to recompute runs over what lies in the trial's blocks."""
    passes, table = trial.lab.recomputer, trial.table
    began = time.perf_counter()
    for one in slices(runs, max_tokens=passes.max_tokens, max_runs=passes.max_runs):
        passes.recompute(trial.token_ids, table, one)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer prompts and rounds")
    prompts, rounds = (2, 5) if parser.parse_args().quick else (PROMPTS, ROUNDS)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # Threads that wait for each other would measure what else the machine does.
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with TemporaryDirectory() as folder:
        model = make_tiny_model(
            Path(folder) / "model", layers=12, hidden=768, heads=12, kv_heads=4, max_length=4096
        )
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"] - 8
        engine = make_engine(model)
        [found] = engine.collective_rpc(work, args=(model, vocabulary, prompts, rounds))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
