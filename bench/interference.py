"""Measures the effect of blends and saves on the token rate of running requests.

Two answers are streamed while prompts of 2,000 tokens arrive one after another. These prompts are
composed of chunks of other prompts, with 30 % of their tokens recomputed. The measure is the time
between two tokens of the streams.

- ``budgeted``: a step recomputes as many tokens as an engine does by default.
- ``unbudgeted``: a step recomputes all of them.
- ``full``: the budgeted engine computes the same prompts, in vLLM's chunks.
- ``quiet``: no prompt arrives.

Saving: prompts with new chunks arrive. ``saving`` has plans, so new KV is copied out and stored.
``plain`` sends the same prompts to the same engine without plans, and with salts so that none hits.
Their order alternates. Both wait IDLE_S after each answer; only the streams decode then, while the
store receives values. ``p99_saving_over_plain`` covers all of the time, in which computing the
prompts makes the longest gaps. ``p99_saving_over_plain_after_answers`` covers these waits alone. A
chunk that does not reach the store is an error.

The streams keep the engine busy, so no chunk is observed. The engines' processes wait asleep (see
``WAITS_ASLEEP``); otherwise the API server can starve, and the gaps would be those of its
starvation.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.blend_ttft import CAPTURED, DOMAIN, Bench, Scene, capture
from bench.support.completion import complete
from bench.support.processes import (
    COMPUTES_PLAIN,
    Engine,
    launch_engine,
    let_engines_sleep,
    running_cachestore,
    wait_for_engine,
)
from bench.support.vllm_plugin import WAITS_ASLEEP, plugin_settings
from ragcache_core.identity.keys import KVSpace
from ragcache_core.plan.prompt import Prompt, plan_blend
from ragcache_core.plan.reuse_plan import ReusePlan
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import LookupKey
from ragcache_kv.model_folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from tests.helpers.tiny_model import make_tiny_model

STREAMS = 2
BUDGET = 0.3
QUIET_S = 3.0
UNBUDGETED = str(1 << 20)
IDLE_S = 1.0
"""Wait after an answer, longer than the transfer of a prompt's values to the store."""

SAVED_S = 60.0


class Streams:
    """Running streams.

    gaps_s: between their tokens, while ``noting``; idle_gaps_s: of these, in ``pause`` alone.
    """

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        self._engine = engine
        self._prompt = prompt
        self._stop = threading.Event()
        self._noting = threading.Event()
        self._pausing = threading.Event()
        self._ended = threading.Event()
        self._begun = threading.Semaphore(0)
        self.gaps_s: list[float] = []
        self.idle_gaps_s: list[float] = []
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
        if self._ended.is_set():
            raise RuntimeError("a stream ended before all had arrived that it was to feel")

    def idle(self) -> None:
        """Let only the streams decode for a while."""
        self._pausing.set()
        time.sleep(IDLE_S)
        self._pausing.clear()

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
                    if self._pausing.is_set():
                        self.idle_gaps_s.append(now - last)
                last = now
        self._ended.set()


def gaps(engine: Engine, prompt: list[int], during: Callable[[], None]) -> list[float]:
    """Collect the times between tokens of the streams during a block."""
    let_engines_sleep()
    with Streams(engine, prompt).running() as streams:
        with streams.noting():
            during()
        return streams.gaps_s


@dataclass(slots=True)
class Newcomers:
    """Prompts with new chunks that arrive at an engine, with and without plans.

    found, idle_windows: gaps of the streams meanwhile, and in the idle_windows behind the answers,
    by case.
    """

    engine: Engine
    store: str
    space: KVSpace
    streamed: list[int]
    found: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    idle_windows: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    firsts: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def measure(self, prompts: Sequence[Prompt], *, saving_first: bool) -> None:
        """Measure both cases with the same prompts; neither hits the KV of the other."""
        for saving in (saving_first, not saving_first):
            case = "saving" if saving else "plain"
            let_engines_sleep()
            with Streams(self.engine, self.streamed).running() as streams:
                with streams.noting():
                    plans = self._arrive(case, prompts, streams)
                self.found[case] += streams.gaps_s
                self.idle_windows[case] += streams.idle_gaps_s
            if saving:
                self._check_saved(prompts, plans)

    def _arrive(
        self, case: str, prompts: Sequence[Prompt], streams: Streams
    ) -> Sequence[ReusePlan]:
        plans = []
        for prompt in prompts:
            plan = plan_blend(prompt, self.space, DOMAIN, uuid.uuid4().hex, BUDGET)
            answer = complete(
                self.engine.url,
                prompt.token_ids,
                max_tokens=1,
                plan=plan.encode() if case == "saving" else None,
                cache_salt=uuid.uuid4().hex,
            )
            self.firsts[case].append(answer.ttft_s)
            plans.append(plan)
            streams.idle()
        return plans

    def _check_saved(self, prompts: Sequence[Prompt], plans: Sequence[ReusePlan]) -> None:
        """Raise RuntimeError unless the store receives every chunk."""
        client = StoreClient(self.store)
        wants = [
            LookupKey.for_variant(named.variant)
            for prompt, plan in zip(prompts, plans, strict=True)
            for named in checked_segments(plan, prompt.token_ids, self.space)
        ]
        deadline = time.monotonic() + SAVED_S
        while not all(found.stored for found in client.lookup(wants, timeout_s=5).variants):
            if time.monotonic() > deadline:
                raise RuntimeError("chunks that were to be saved are not with the store")
            time.sleep(0.05)
        client.close()


def new_prompts(rng: random.Random, vocabulary: int, count: int) -> list[Prompt]:
    """Return prompts of new chunks."""
    scenes = [Scene.make(rng, vocabulary, 1) for _ in range(-(-count // CAPTURED[1]))]
    return [scene.captured(number) for scene in scenes for number in range(CAPTURED[1])][:count]


def p99_ms(seconds: list[float]) -> float:
    return round(statistics.quantiles(seconds, n=100, method="inclusive")[98] * 1e3, 1)


def run(arrivals: int, folder: Path) -> dict[str, object]:
    """Measure and return the figures of the JSON line."""
    model = make_tiny_model(folder / "model", layers=12, hidden=768, heads=12, kv_heads=4)
    loaded = load_model_folder(str(model))
    space = loaded.space("auto")
    rng = random.Random(uuid.uuid4().int)
    vocabulary = int(loaded.config["vocab_size"]) - 8
    scene = Scene.make(rng, vocabulary, 1)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(running_cachestore(folder / "store", memory_bytes=2 << 30))
        usual = COMPUTES_PLAIN | plugin_settings(folder / "plugin", WAITS_ASLEEP)
        engines = {
            name: launch_engine(folder, model, store.address, settings=usual | own)
            for name, own in {
                "budgeted": {},
                "unbudgeted": {"RAGCACHE_RECOMPUTE_SLICE_TOKENS": UNBUDGETED},
            }.items()
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
                    plan = plan_blend(prompt, space, DOMAIN, uuid.uuid4().hex, budget).encode()
                # A salt bypasses the engine's own prefix cache.
                salt = uuid.uuid4().hex
                answer = complete(
                    engine.url, prompt.token_ids, max_tokens=1, plan=plan, cache_salt=salt
                )
                firsts[name].append(answer.ttft_s)

        for engine in engines.values():
            arrive("warm_up", engine, BUDGET)
        for _ in range(2):  # twice in turn, so that slow minutes affect all cases
            found["quiet"] += gaps(ours, streamed, lambda: time.sleep(QUIET_S))
            for name, engine in engines.items():
                found[name] += gaps(engine, streamed, partial(arrive, name, engine, BUDGET))
            found["full"] += gaps(ours, streamed, partial(arrive, "full", ours, None))
        newcomers = Newcomers(ours, store.address, space, streamed)
        for turn in range(
            2
        ):  # last, because their chunks are observed while other engines are timed
            new = new_prompts(rng, vocabulary, arrivals)
            newcomers.measure(new, saving_first=bool(turn))
    found |= newcomers.found
    firsts |= newcomers.firsts
    idle_windows = newcomers.idle_windows
    p99 = {name: p99_ms(seconds) for name, seconds in found.items()}
    return {
        "itl_p99_unbudgeted_over_budgeted": round(p99["unbudgeted"] / p99["budgeted"], 2),
        "itl_p99_full_over_budgeted": round(p99["full"] / p99["budgeted"], 2),
        "p99_saving_over_plain": round(p99["saving"] / p99["plain"], 3),
        "p99_saving_over_plain_after_answers": round(
            p99_ms(idle_windows["saving"]) / p99_ms(idle_windows["plain"]), 3
        ),
        "mean_saving_over_plain_after_answers": round(
            statistics.fmean(idle_windows["saving"]) / statistics.fmean(idle_windows["plain"]), 3
        ),
        "itl_after_answers_ms": {
            name: {"p99": p99_ms(s), "median": round(statistics.median(s) * 1e3, 1)}
            for name, s in idle_windows.items()
        },
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
