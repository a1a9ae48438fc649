"""What requests that are being answered feel of blends that arrive beside them.

Two answers are streamed while prompts of 2,000 tokens arrive one after another, put together from
chunks of other prompts with 30 % of their tokens recomputed. What is measured is the time between
two tokens of the streams. budgeted: a step recomputes as many tokens as an engine does by default.
unbudgeted: a step recomputes all there is. full: the same prompts computed by the budgeted engine,
in pieces as large as vLLM cuts them. quiet: nothing arrives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.blend_ttft import DOMAIN, Bench, Scene, capture
from bench.completion import complete
from bench.processes import (
    COMPUTES_PLAIN,
    Engine,
    launch_engine,
    let_engines_sleep,
    running_cachestore,
    wait_for_engine,
)
from ragcache_core.prompt import plan_blend
from ragcache_kv.model_folder import load_model_folder
from tests.tiny_model import make_tiny_model

STREAMS = 2
BUDGET = 0.3
QUIET_S = 3.0
UNBUDGETED = str(1 << 20)


class Streams:
    """Answers that are being streamed; gaps_s: between their tokens, while ``noting``."""

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        self._engine = engine
        self._prompt = prompt
        self._stop = threading.Event()
        self._noting = threading.Event()
        self._begun = threading.Semaphore(0)
        self.gaps_s: list[float] = []
        self._threads = [threading.Thread(target=self._read) for _ in range(STREAMS)]

    @contextlib.contextmanager
    def running(self) -> Iterator[Streams]:
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._begun.acquire()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        self._noting.set()
        try:
            yield
        finally:
            self._noting.clear()

    def _read(self) -> None:
        body = {
            "model": "model",
            "prompt": self._prompt,
            "max_tokens": 3000,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{self._engine.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as reply:
            last = None
            for line in reply.iter_lines():
                if self._stop.is_set():
                    return
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                if last is None:
                    self._begun.release()
                elif self._noting.is_set():
                    self.gaps_s.append(now - last)
                last = now


def gaps(engine: Engine, prompt: list[int], during: Callable[[], None]) -> list[float]:
    """Times between tokens of streams while something else is done."""
    let_engines_sleep()
    with Streams(engine, prompt).running() as streams:
        with streams.noting():
            during()
        return streams.gaps_s


def p99_ms(seconds: list[float]) -> float:
    return round(statistics.quantiles(seconds, n=100, method="inclusive")[98] * 1e3, 1)


def run(arrivals: int, folder: Path) -> dict[str, object]:
    """Measure; returns the figures of the JSON line."""
    model = make_tiny_model(folder / "model", layers=12, hidden=768, heads=12, kv_heads=4)
    loaded = load_model_folder(str(model))
    space = loaded.space("auto")
    rng = random.Random(uuid.uuid4().int)
    scene = Scene.make(rng, int(loaded.config["vocab_size"]) - 8, 1)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(running_cachestore(folder / "store", memory_bytes=1 << 30))
        engines = {
            "budgeted": launch_engine(folder, model, store.address, settings=COMPUTES_PLAIN),
            "unbudgeted": launch_engine(
                folder,
                model,
                store.address,
                settings={"RAGCACHE_REPAIR_SLICE_TOKENS": UNBUDGETED, **COMPUTES_PLAIN},
            ),
        }
        for engine in engines.values():
            stack.callback(engine.service.stop)
        for engine in engines.values():
            wait_for_engine(engine)
        ours = engines["budgeted"]
        capture(Bench(ours, ours, space, defaultdict(list), defaultdict(list)), store, scene)
        prompts = [scene.blended(number, rng) for number in range(arrivals)]
        firsts: dict[str, list[float]] = defaultdict(list)
        found: dict[str, list[float]] = defaultdict(list)
        streamed = list(scene.captured(0).token_ids[:200])

        def arrive(name: str, engine: Engine, budget: float | None) -> None:
            for prompt in prompts:
                plan = None
                if budget is not None:
                    plan = plan_blend(prompt, space, DOMAIN, uuid.uuid4().hex, budget).to_json()
                # A salt hides what the engine holds itself.
                salt = uuid.uuid4().hex
                answer = complete(
                    engine.url, prompt.token_ids, max_tokens=1, plan=plan, cache_salt=salt
                )
                firsts[name].append(answer.ttft_s)

        for engine in engines.values():
            arrive("warm_up", engine, BUDGET)
        for _ in range(2):  # one after another twice, so that slow minutes fall on all
            found["quiet"] += gaps(ours, streamed, lambda: time.sleep(QUIET_S))
            for name, engine in engines.items():
                found[name] += gaps(engine, streamed, partial(arrive, name, engine, BUDGET))
            found["full"] += gaps(ours, streamed, partial(arrive, "full", ours, None))
    p99 = {name: p99_ms(seconds) for name, seconds in found.items()}
    return {
        "itl_p99_unbudgeted_over_budgeted": round(p99["unbudgeted"] / p99["budgeted"], 2),
        "itl_p99_full_over_budgeted": round(p99["full"] / p99["budgeted"], 2),
        "itl_p99_ms": p99,
        "itl_max_ms": {name: round(max(s) * 1e3, 1) for name, s in found.items()},
        "itl_median_ms": {n: round(statistics.median(s) * 1e3, 1) for n, s in found.items()},
        "ttft_ms": {n: round(statistics.median(s) * 1e3, 1) for n, s in firsts.items()},
        "arrivals": 2 * arrivals,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 x 3 arrivals instead of 2 x 20")
    arrivals = 3 if parser.parse_args().quick else 20
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(arrivals, Path(folder))))


if __name__ == "__main__":
    main()
