"""Measures the whole platform with several engines, and rivals that choose the engine otherwise.

Gateway, retriever and cache store are the real processes with the settings of ``ragcache up``. An
open-loop client asks over HTTP: arrivals are a Poisson process, and latencies count from the
planned arrival. Documents and questions are those of XQuAD with ``--data``, or generated ones. A
question of rank r is asked with weight 1 / r, as in production traces.

**Simulated engines** (``bench/support/cluster/simulated_engine.py``) run RagCache's scheduler half
with the times of a model like Llama 3 8B on an A100. Times are multiplied by ``--scale``, so that
two cores suffice for all processes. Each contestant has its own gateway, engines and cache store,
so each has the caches that its own choices give. All are up at once, and idle ones cost next to
nothing. Turns of equal requests rotate (``bench/support/comparison.py``).

**Real engines** are vLLM with one thread each. Contestants share the engines and the store, because
more would not fit. Each has a system prompt of its own, so it reuses only its own KV.

Contestants: ``ours``, and the rivals of ``bench/support/cluster/rivals.py``, whose gateways are the
same but for the choice of the engine. Figures for each rival X of the simulated engines:

- ``ttft_p50_X_over_ours``, ``ttft_p90_X_over_ours``: quotients of times to the first token.
  A failed request counts as one of 120 s.
- ``goodput_X_over_ours``: quotient of answers whose first token comes within ``slo_s``.

Others: ``prediction_error_median`` is how far the plan's predicted time in the engine is off the
measured one, on real engines. ``max_wait_over_mean`` is the longest mean wait of an engine over the
mean of all requests, with questions about one document; ``max_wait_over_mean_by_chance`` is what it
would be if engines were dealt by chance. ``simulation_error_median`` compares a
simulated with a real engine on the same requests; its times are measured at the real one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.answers.platform import Platform as Rest
from bench.support.answers.question_sets import QuestionSet
from bench.support.cluster import processes
from bench.support.cluster.calibration import (
    engine_requests,
    measured_times,
    simulation_errors,
)
from bench.support.cluster.engine_times import EngineTimes, a100
from bench.support.cluster.figures import (
    OURS,
    first_times,
    max_wait_over_mean,
    ratios,
    summary,
)
from bench.support.cluster.open_loop import Answered, Asked, ask_all
from bench.support.cluster.processes import Platform, PlatformSpec, simulated_model
from bench.support.cluster.questions import (
    NUM_QUESTIONS,
    hot_document,
    hot_questions,
    known_questions,
    skewed,
)
from bench.support.cluster.rivals import RIVALS
from bench.support.comparison import turns
from bench.support.program import options, print_figures, say
from harness.processes import Service, answers, free_port
from harness.vllm_plugin import WAITS_ASLEEP, plugin_settings
from ragcache_cli.models.cache import fetch_model

ALL = (OURS, *RIVALS)
DATA_VARIABLE = "RAGCACHE_BENCH_DATA"
TINYRAG = Path(__file__).resolve().parents[1] / "models" / "tinyrag" / "model"
CALIBRATED_CACHE_TOKENS = 200_000
SEED = 1
TOP_K = 3
ANSWER_TOKENS = 16
HOT = "hot"
PROMPT_TOKENS = 1770
"""About the length of a prompt with its documents, for the rate of the questions."""

PASTED_TOKENS = 1000
"""About the length of a text of ``hot_questions``."""

LOAD, HOT_LOAD, REAL_LOAD = 0.9, 0.7, 0.3
"""Rate of the questions, over what the engines could serve if they computed all tokens; of those
about one document, if they had that document."""

SLO_FACTOR = 2.0
"""The first token's limit, over the time to compute a prompt in an idle engine."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        engines: Simulated engines of each contestant.
        scale: Factor of the simulated times.
        cache_tokens: KV cache of a simulated engine.
        warm_up: Requests of each contestant before the measured ones.
        requests: Measured ones.
        block: Requests of a turn.
        questions: Different questions, and so prompts.
        hot: Questions about one document.
        real_engines: Engines of vLLM.
        real_warm_up: Requests of each contestant to them before the measured ones.
        real_requests: Measured requests of each contestant to them.
    """

    engines: int
    scale: float
    cache_tokens: int
    warm_up: int
    requests: int
    block: int
    questions: int
    hot: int
    real_engines: int
    real_warm_up: int
    real_requests: int


FULL = Sizes(16, 8.0, 24_000, 600, 1200, 300, NUM_QUESTIONS, 600, 2, 60, 160)
QUICK = Sizes(4, 2.0, 16_000, 80, 80, 40, 60, 80, 2, 10, 16)
"""The prompts of all questions have about 1.5 times as many tokens as all caches. By the end of the
warm-up, most requests ask what somebody has asked before."""


@dataclass(slots=True)
class Contestant:
    """A gateway of its own, and what the client saw of it.

    Attributes:
        system: System prompt of its next turn; None: the platform's.
    """

    name: str
    port: int
    answered: dict[int, Answered] = field(default_factory=dict)
    system: str | None = None

    def wait_until_answering(self, gateway: Service) -> None:
        """Wait until its gateway knows engines."""
        url = f"http://127.0.0.1:{self.port}/v1/status"
        gateway.wait_until("ready", lambda: answers(url))

    def ask(self, asked: Sequence[Asked], collection: str) -> list[Answered]:
        """Ask questions at their times, the first one at once."""
        first_s = asked[0].at_s
        shifted = [Asked(one.at_s - first_s, one.question) for one in asked]
        fields = {
            "max_tokens": ANSWER_TOKENS,
            "ragcache": {"collection": collection, "top_k": TOP_K, "explain": True},
        }
        return asyncio.run(ask_all(self.port, shifted, fields, self.system))

    def turn(self, asked: Sequence[Asked], indices: Sequence[int], collection: str) -> None:
        """Ask the questions of some indices, and keep the answers."""
        found = self.ask([asked[index] for index in indices], collection)
        self.answered.update(zip(indices, found, strict=True))
        times = first_times(found)
        failed = [one.error for one in found if one.error]
        behind_s = max(one.behind_s for one in found)
        say(
            f"{self.name}: p50 {np.quantile(times, 0.5):.3f} s, p90 {np.quantile(times, 0.9):.3f} s"
            f", sent at most {behind_s:.3f} s late, failed: {len(failed)} {failed[:1]}"
        )


def gateway_command(name: str) -> list[str]:
    """Return the command of a contestant's gateway."""
    module = ["ragcache_gateway"] if name == OURS else ["bench.support.cluster.rivals", name]
    return [sys.executable, "-m", *module]


@contextlib.contextmanager
def simulated_contestants(
    folder: Path, spec: PlatformSpec, times: EngineTimes, known: QuestionSet
) -> Iterator[list[Contestant]]:
    """Contestants with a platform of simulated engines each, all with the same documents."""
    with contextlib.ExitStack() as stack:
        platforms: dict[str, Platform] = {}
        for name in ALL:
            one = stack.enter_context(processes.platform(spec, folder / name))
            one.start("cachestore")
            platforms[name] = one
        first = platforms[OURS]
        # Its retriever takes the tokens of all gateways; its own key stays the first one.
        others = [one.key_file.read_text() for one in platforms.values() if one is not first]
        first.key_file.write_text(first.key_file.read_text() + "".join(others))
        first.start("retriever")
        first.wait("retriever")
        for one in platforms.values():
            one.wait("cachestore")
            one.simulate_engines(times)
        for name, one in platforms.items():
            one.wait(*(engine.name for engine in one.of("engine")))
            retriever = first.components["gateway"].env["RAGCACHE_RETRIEVER"]
            one.start("gateway", gateway_command(name), RAGCACHE_RETRIEVER=retriever)
        found = [Contestant(name, one.port("gateway")) for name, one in platforms.items()]
        for contestant, one in zip(found, platforms.values(), strict=True):
            one.wait("gateway")
            contestant.wait_until_answering(one.services["gateway"])
        ingest(first.port("gateway"), known)
        yield found


def ingest(port: int, known: QuestionSet) -> None:
    """Put the documents, and the hot one into a collection of its own."""
    rest = Rest(f"http://127.0.0.1:{port}")
    rest.put_collection(known.name, {}, known.documents)
    chunking = {"chunking": {"size_tokens": 2048, "overlap_tokens": 0}}
    rest.put_collection(HOT, chunking, [hot_document(SEED)])
    rest.close()


def measure_simulated(
    sizes: Sizes, times: EngineTimes, folder: Path, known: QuestionSet
) -> dict[str, Any]:
    """Compare the contestants on simulated engines."""
    times = times.scaled(sizes.scale)
    full_s = times.profile.predict(0, PROMPT_TOKENS)
    rate = LOAD * sizes.engines / full_s
    count = sizes.warm_up + sizes.requests
    asked = skewed(texts_of(known, sizes), count, rate, SEED)
    spec = PlatformSpec(simulated_model(folder / "model"), sizes.engines)
    with simulated_contestants(folder, spec, times, known) as contestants:
        replay(contestants, asked, range(sizes.warm_up), sizes.warm_up, known.name)
        measured = range(sizes.warm_up, count)
        replay(contestants, asked, measured, sizes.block, known.name)
        found = {one.name: [one.answered[i] for i in measured] for one in contestants}
        slo_s = SLO_FACTOR * full_s
        figures = ratios(found, slo_s)
        hot_rate = HOT_LOAD * sizes.engines / times.profile.predict(PASTED_TOKENS, PASTED_TOKENS)
        flood = contestants[0].ask(hot_questions(sizes.hot, hot_rate, SEED), HOT)
    longest, by_chance = max_wait_over_mean(flood)
    return {
        **figures,
        "max_wait_over_mean": longest,
        "max_wait_over_mean_by_chance": by_chance,
        "hot_mean_wait_s": round(statistics.fmean(one.wait_s for one in flood if one.details), 4),
        "slo_s": round(slo_s, 3),
        "requests_per_s": round(rate, 2),
        "hot_requests_per_s": round(hot_rate, 2),
        "contestants": {name: summary(answers, slo_s) for name, answers in found.items()},
    }


def texts_of(known: QuestionSet, sizes: Sizes) -> list[str]:
    """Return the questions that are asked, the most popular one first."""
    return [one.text for one in known.questions[: sizes.questions]]


def replay(
    contestants: Sequence[Contestant],
    asked: Sequence[Asked],
    indices: range,
    block: int,
    collection: str,
    *,
    apart: bool = False,
) -> None:
    """Ask in turns. ``apart``: each contestant has a system prompt, and so KV, of its own."""
    by_name = {one.name: one for one in contestants}
    for turns_of_block in turns(tuple(by_name), indices, block):
        for turn in turns_of_block:
            one = by_name[turn.contestant]
            if apart:
                one.system = f"Edition {one.name}. Answer from the documents."
            one.turn(asked, turn.requests, collection)


def measure_real(sizes: Sizes, model: Path, folder: Path, known: QuestionSet) -> dict[str, Any]:
    """Compare the contestants on engines of vLLM, and a simulated engine with one of them."""
    spec = PlatformSpec(model, sizes.real_engines)
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(processes.platform(spec, folder / "real"))
        engines = one.of("engine")
        one.start("cachestore")
        one.wait("cachestore")
        waits = plugin_settings(folder / "plugin", WAITS_ASLEEP)
        for engine in engines:
            one.start(engine.name, **waits)
        one.start("retriever")
        one.wait("retriever")
        contestants = [start_gateway(one, name) for name in ALL]
        ingest(contestants[0].port, known)
        one.wait(*(engine.name for engine in engines))
        say("real engines are up")
        port, address = engines[0].ports["http"].port, str(engines[0].ports["grpc"])
        times = asyncio.run(measured_times(port, address, CALIBRATED_CACHE_TOKENS, one.keys))
        say(f"measured {times}")
        requests = engine_requests(times, 3 * sizes.real_requests // 2, SEED)
        real = asyncio.run(requests.ask(port, one.keys))
        with simulated_engine(folder / "simulated", spec, times) as simulated_port:
            errors = simulation_errors(real, asyncio.run(requests.ask(simulated_port, one.keys)))
        for contestant in contestants:
            contestant.wait_until_answering(one.services[contestant.name])
        full_s = times.profile.predict(0, PROMPT_TOKENS)
        rate = REAL_LOAD * sizes.real_engines / (full_s + ANSWER_TOKENS * times.decode_s)
        count = sizes.real_warm_up + sizes.real_requests
        asked = skewed(texts_of(known, sizes), count, rate, SEED)
        warm_up, measured = range(sizes.real_warm_up), range(sizes.real_warm_up, count)
        replay(contestants, asked, warm_up, len(warm_up), known.name, apart=True)
        block = -(-sizes.real_requests // 2)
        replay(contestants, asked, measured, block, known.name, apart=True)
        found = {one.name: [one.answered[i] for i in measured] for one in contestants}
    slo_s = SLO_FACTOR * full_s
    return {
        **ratios(found, slo_s),
        "simulation_error_median": round(statistics.median(errors), 4),
        "requests_per_s": round(rate, 2),
        "contestants": {name: summary(answers, slo_s) for name, answers in found.items()},
    }


@contextlib.contextmanager
def simulated_engine(folder: Path, spec: PlatformSpec, times: EngineTimes) -> Iterator[int]:
    """One simulated engine with a store of its own. Yields its port."""
    with processes.platform(replace(spec, engines=1), folder) as one:
        one.start("cachestore")
        one.wait("cachestore")
        one.simulate_engines(times)
        [engine] = one.of("engine")
        one.wait(engine.name)
        yield engine.ports["http"].port


def start_gateway(one: Platform, name: str) -> Contestant:
    """Start a contestant's gateway beside others on the same engines."""
    port = free_port()
    listen = {
        "RAGCACHE_LISTEN": f"127.0.0.1:{port}",
        "RAGCACHE_METRICS_LISTEN": f"127.0.0.1:{free_port()}",
    }
    one.start("gateway", gateway_command(name), **listen)
    one.services[name] = service = one.services.pop("gateway")
    service.wait_until("up", lambda: answers(f"http://127.0.0.1:{port}/healthz"))
    return Contestant(name, port)


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure what the command line asks for."""
    started_s = time.monotonic()
    sizes = QUICK if arguments.quick else FULL
    changed = {name: getattr(arguments, name) for name in ("engines", "scale")}
    sizes = replace(sizes, **{name: value for name, value in changed.items() if value})
    known = known_questions(None if arguments.quick else arguments.data, SEED)
    figures: dict[str, Any] = {}
    if "real" in arguments.only:
        model = fetch_model(arguments.model) if arguments.model else TINYRAG
        real = measure_real(sizes, model, folder, known)
        figures["prediction_error_median"] = real["contestants"][OURS]["prediction_error_median"]
        figures["simulation_error_median"] = real["simulation_error_median"]
        figures["real"] = real
        say(f"real engines: {time.monotonic() - started_s:.0f} s so far")
    if "simulated" in arguments.only:
        times = a100(arguments.link_gbits, sizes.cache_tokens)
        figures |= measure_simulated(sizes, times, folder, known)
    return figures | {
        "documents": known.name,
        "sizes": asdict(sizes),
        "took_s": round(time.monotonic() - started_s, 1),
    }


def main() -> None:
    parser = options(__doc__, "few engines and requests, generated documents; 4 minutes")
    option = parser.add_argument
    data = os.environ.get(DATA_VARIABLE)
    option("--data", type=Path, default=data and Path(data), help=f"or {DATA_VARIABLE}")
    option("--only", nargs="+", choices=("simulated", "real"), default=("real", "simulated"))
    option("--engines", type=int, help="simulated engines of each contestant")
    option("--scale", type=float, help="factor of the simulated times; more needs less CPU")
    option("--link-gbits", type=float, default=25.0, help="between engine and store, simulated")
    option("--model", help="bundled model of the real engines, in place of tinyrag")
    arguments = parser.parse_args()
    print_figures(lambda folder: run(arguments, folder))


if __name__ == "__main__":
    main()
