"""What requests that are being answered feel of blends that arrive beside them.

Two answers are streamed while prompts of 2,000 tokens arrive one after another, put together from
chunks of other prompts with 30 % of their tokens recomputed. What is measured is the time between
two tokens of the streams. budgeted: a step recomputes as many tokens as an engine does by default.
unbudgeted: a step recomputes all there is. full: the same prompts computed by the budgeted engine,
in pieces as large as vLLM cuts them. quiet: nothing arrives.

What saving does: prompts arrive whose chunks are all new. saving: with plans, so that what is
computed is copied out and sent to the store. plain: the same prompts to the same engine without
plans, so that nothing is saved, and with salts, so that nothing is found. Which comes first takes
turns. Both leave PAUSE_S after each answer, in which the streams alone decode while the store is
sent what was computed; ``p99_saving_over_plain`` is of all that time, in which computing the
prompts makes the longest gaps, ``p99_saving_over_plain_after_answers`` of the pauses alone. It is
an error if not all chunks come to the store. Streams never let the engine be idle, so observing
chunks, which it does only then, is in none of these. Processes of the engines wait for one another
asleep (see ``WAITS_ASLEEP``): else the API server may starve, and gaps are those of its starving.
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
PAUSE_S = 1.0
"""After an answer; longer than it takes to send a prompt's values to the store."""

SAVED_S = 60.0


class Streams:
    """Answers that are being streamed.

    gaps_s: between their tokens, while ``noting``; pause_gaps_s: of these, in ``pause`` alone.
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
        self.pause_gaps_s: list[float] = []
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

    def pause(self) -> None:
        """Let the streams decode alone for a while."""
        self._pausing.set()
        time.sleep(PAUSE_S)
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
                        self.pause_gaps_s.append(now - last)
                last = now
        self._ended.set()


def gaps(engine: Engine, prompt: list[int], during: Callable[[], None]) -> list[float]:
    """Times between tokens of streams while something else is done."""
    let_engines_sleep()
    with Streams(engine, prompt).running() as streams:
        with streams.noting():
            during()
        return streams.gaps_s


@dataclass(slots=True)
class Newcomers:
    """Prompts of all-new chunks that arrive at an engine, with plans and without.

    found, pauses: gaps of the streams meanwhile, and in the pauses behind the answers, by case.
    """

    engine: Engine
    store: str
    space: KVSpace
    streamed: list[int]
    found: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    pauses: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    firsts: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def measure(self, prompts: Sequence[Prompt], *, saving_first: bool) -> None:
        """Both cases with the same prompts; neither finds anything of what the other computed."""
        for saving in (saving_first, not saving_first):
            case = "saving" if saving else "plain"
            let_engines_sleep()
            with Streams(self.engine, self.streamed).running() as streams:
                with streams.noting():
                    plans = self._arrive(case, prompts, streams)
                self.found[case] += streams.gaps_s
                self.pauses[case] += streams.pause_gaps_s
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
                plan=plan.to_json() if case == "saving" else None,
                cache_salt=uuid.uuid4().hex,
            )
            self.firsts[case].append(answer.ttft_s)
            plans.append(plan)
            streams.pause()
        return plans

    def _check_saved(self, prompts: Sequence[Prompt], plans: Sequence[ReusePlan]) -> None:
        """Raises RuntimeError unless the store comes to hold every chunk."""
        client = StoreClient(self.store)
        wants = [
            LookupKey.of(named.variant)
            for prompt, plan in zip(prompts, plans, strict=True)
            for named in checked_segments(plan, prompt.token_ids, self.space)
        ]
        deadline = time.monotonic() + SAVED_S
        while not all(found.held for found in client.lookup(wants, timeout_s=5).variants):
            if time.monotonic() > deadline:
                raise RuntimeError("chunks that were to be saved are not with the store")
            time.sleep(0.05)
        client.close()


def new_prompts(rng: random.Random, vocabulary: int, count: int) -> list[Prompt]:
    """Prompts of chunks that nobody has seen."""
    scenes = [Scene.make(rng, vocabulary, 1) for _ in range(-(-count // CAPTURED[1]))]
    return [scene.captured(number) for scene in scenes for number in range(CAPTURED[1])][:count]


def p99_ms(seconds: list[float]) -> float:
    return round(statistics.quantiles(seconds, n=100, method="inclusive")[98] * 1e3, 1)


def run(arrivals: int, folder: Path) -> dict[str, object]:
    """Measure; returns the figures of the JSON line."""
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
        newcomers = Newcomers(ours, store.address, space, streamed)
        for turn in range(2):  # last: their chunks are observed while other engines are timed
            new = new_prompts(rng, vocabulary, arrivals)
            newcomers.measure(new, saving_first=bool(turn))
    found |= newcomers.found
    firsts |= newcomers.firsts
    pauses = newcomers.pauses
    p99 = {name: p99_ms(seconds) for name, seconds in found.items()}
    return {
        "itl_p99_unbudgeted_over_budgeted": round(p99["unbudgeted"] / p99["budgeted"], 2),
        "itl_p99_full_over_budgeted": round(p99["full"] / p99["budgeted"], 2),
        "p99_saving_over_plain": round(p99["saving"] / p99["plain"], 3),
        "p99_saving_over_plain_after_answers": round(
            p99_ms(pauses["saving"]) / p99_ms(pauses["plain"]), 3
        ),
        "mean_saving_over_plain_after_answers": round(
            statistics.fmean(pauses["saving"]) / statistics.fmean(pauses["plain"]), 3
        ),
        "itl_after_answers_ms": {
            name: {"p99": p99_ms(s), "median": round(statistics.median(s) * 1e3, 1)}
            for name, s in pauses.items()
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
