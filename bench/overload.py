"""Measures limits by priority and tenant while more is asked than the engines can answer.

Gateway, retriever and cache store are the real processes; the engines are simulated, as in
``bench/cluster.py``. ``spec.gateway.slo`` limits the time to the first token. Three tenants ask
over HTTP, each with a key and an open loop: ``gold`` has the better priority and a fifth of the
capacity. ``red`` and ``blue`` share what is left as 1 to 2, and both ask for more. No client tries
again.

Each question has a system prompt of its own, so engines reuse nothing, or the capacity would grow
while the caches fill. The capacity is what the engines answer while requests always wait for them.
Then ``gold`` asks alone, all ask what the engines can answer, and all ask 1.5 times that. The time
in which queues fill, and what comes after the last question, do not count. Figures:

- ``high_ttft_p90_over_unloaded``: time to the first token of ``gold`` under overload, over that of
  ``gold`` alone.
- ``goodput_over_peak``: first tokens within the limit per second under overload, over the most of
  the other loads.
- ``max_share_error``: by how much the engines' time of a tenant is off its share, as a part of it.
  That of ``gold`` is what it asks for, so its error is the part of its questions that were refused.
- ``other_errors``: answers that are neither complete, nor 429 or 503 with ``Retry-After``.

``python -m bench.overload [--quick]`` prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.support.answers.platform import Platform as Rest
from bench.support.answers.question_sets import QuestionSet
from bench.support.api_keys import headers, key
from bench.support.cluster import processes
from bench.support.cluster.engine_times import EngineTimes, a100
from bench.support.cluster.open_loop import CHAT, Answered, Asked, ask
from bench.support.cluster.processes import Platform, PlatformSpec, simulated_model
from bench.support.cluster.questions import known_questions, skewed
from bench.support.program import options, print_figures, say
from ragcache_core.access.key_file import hash_text

SEED: Final = 1
TOP_K: Final = 3
PROMPT_TOKENS: Final = 1770
"""About the length of a prompt with its documents."""

ANSWER_TOKENS: Final = 16
LINK_GBITS: Final = 25.0
CACHE_TOKENS: Final = 24_000
LIMIT_FACTOR: Final = 4.0
"""The limit of the first token, over the time to compute a prompt in an idle engine."""

WAITING: Final = 8
"""Requests in flight for each engine while the capacity is measured: some wait although others get
the tokens after their first one. What is refused is asked again RETRY_S later."""

RETRY_S: Final = 0.5

OVERLOAD: Final = 1.5
RAMP_LIMITS: Final = 2.0
"""Time until an overload has filled the queues, over the limit of the first token."""

ADMIN: Final = "admin"
_REFUSALS: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant with one key.

    Attributes:
        priority: A lower one goes first.
        share: Of the engines, when all ask for more.
        load: What it asks for, over all that is asked.
    """

    name: str
    priority: int
    share: float
    load: float


GOLD: Final = Tenant("gold", 0, 0.2, 0.2 / OVERLOAD)
SHARING: Final = (
    Tenant("red", 10, 0.8 / 3, (1 - GOLD.load) / 2),
    Tenant("blue", 10, 1.6 / 3, (1 - GOLD.load) / 2),
)
TENANTS: Final = (GOLD, *SHARING)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        scale: Factor of the simulated times.
        capacity_s: Seconds for which requests always wait. The second half of them counts.
        unloaded_s: Seconds of the high band alone.
        peak_loads: Loads over the capacity, for the most goodput.
        peak_s: Seconds of each of them.
        overload_s: Seconds of the overload.
    """

    engines: int
    scale: float
    capacity_s: float
    unloaded_s: float
    peak_loads: tuple[float, ...]
    peak_s: float
    overload_s: float

    def scaled(self, factor: float) -> Sizes:
        """Return the sizes for engines that are slower by a factor."""
        names = ("scale", "capacity_s", "unloaded_s", "peak_s", "overload_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


FULL: Final = Sizes(8, 6.0, 60.0, 60.0, (0.9, 1.0, 1.1), 60.0, 120.0)
QUICK: Final = Sizes(4, 3.0, 8.0, 8.0, (1.0,), 9.0, 14.0)


def write_keys(file: Path) -> Path:
    """Write the keys of the tenants, and one that puts the documents."""
    entries = [f'[[keys]]\nname = "{ADMIN}"\nhash = "{hash_text(key(ADMIN))}"\nscopes = ["admin"]']
    for one in TENANTS:
        hashed = hash_text(key(one.name))
        entries.append(
            f'[[keys]]\nname = "{one.name}"\nhash = "{hashed}"\nscopes = ["ask"]\n'
            f'tenant = "{one.name}"\npriority = {one.priority}\n'
            f'[[tenants]]\nname = "{one.name}"\nweight = {10 * one.share:.4f}'
        )
    file.write_text("\n".join(entries) + "\n")
    return file


@dataclass(frozen=True, slots=True)
class Seen:
    """A question of a tenant, and what became of it."""

    tenant: str
    at_s: float
    answer: Answered

    @property
    def first_at_s(self) -> float:
        """When the first token came, in seconds of its run."""
        return self.at_s + self.answer.first_s

    @property
    def engine_s(self) -> float:
        """Seconds that an engine took for its first token; nan: the engine's record is missing."""
        took = self.answer.details.get("explanation", {}).get("time")
        return math.nan if took is None else float(took["measured_ms"]["total"]) / 1e3

    @property
    def is_refused(self) -> bool:
        """Whether the client was told when to come again."""
        return self.answer.status in _REFUSALS and self.answer.can_retry


@dataclass(frozen=True, slots=True)
class Run:
    """The questions of one load.

    Attributes:
        from_s: What comes earlier does not count.
        until_s: The time of the last question.
    """

    seen: Sequence[Seen]
    from_s: float
    until_s: float

    def began(self) -> list[Seen]:
        """Return the questions whose first token came in the time that counts."""
        return [one for one in self.seen if self.from_s <= one.first_at_s <= self.until_s]

    def goodput(self, limit_s: float) -> float:
        """Return first tokens within a limit, per second."""
        good = sum(one.answer.first_s <= limit_s for one in self.began())
        return good / (self.until_s - self.from_s)

    def first_times(self, tenant: str) -> list[float]:
        """Return the times to the first token of a tenant's answered questions, in seconds."""
        found = [one for one in self.seen if one.tenant == tenant and one.at_s >= self.from_s]
        return [one.answer.first_s for one in found if not one.answer.error]

    def refused_share(self, tenant: str) -> float:
        """Return the part of a tenant's questions that was not answered."""
        found = [one for one in self.seen if one.tenant == tenant and one.at_s >= self.from_s]
        return sum(bool(one.answer.error) for one in found) / max(1, len(found))

    def shares(self) -> dict[str, float]:
        """Return the shares of the engines' time of the tenants that share a band."""
        took = {one.name: [0.0] for one in SHARING}
        for one in self.began():
            if one.tenant in took:
                took[one.tenant].append(one.engine_s)
        sums = {name: len(times) * float(np.nanmean(times)) for name, times in took.items()}
        total_s = math.fsum(sums.values()) or math.nan
        return {name: seconds / total_s for name, seconds in sums.items()}

    def other_errors(self) -> list[str]:
        """Return the errors that no client expects."""
        return [one.answer.error for one in self.seen if one.answer.error and not one.is_refused]

    def summary(self, limit_s: float) -> dict[str, Any]:
        """Return what a reader wants to know of the run."""
        found: dict[str, Any] = {"goodput_per_s": round(self.goodput(limit_s), 3)}
        for tenant in TENANTS:
            times = self.first_times(tenant.name) or [math.nan]
            found[tenant.name] = {
                "asked": sum(one.tenant == tenant.name for one in self.seen),
                "refused_share": round(self.refused_share(tenant.name), 4),
                "ttft_p50_s": round(float(np.quantile(times, 0.5)), 4),
                "ttft_p90_s": round(float(np.quantile(times, 0.9)), 4),
                "over_limit": sum(one > limit_s for one in times),
            }
        return found


class Client:
    """Asks the questions of all tenants.

    Args:
        known: The documents and questions.
    """

    def __init__(self, port: int, known: QuestionSet) -> None:
        self._port = port
        self._texts = [one.text for one in known.questions]
        self._fields = {
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
            "ragcache": {"collection": known.name, "top_k": TOP_K, "explain": True},
        }
        self._seed = SEED
        self._numbers = itertools.count()

    async def capacity(self, seconds: float, num_waiting: int) -> float:
        """Return the answers per second while so many requests are in flight."""
        until_s, ends_s = time.monotonic() + seconds, list[float]()
        rng = random.Random(SEED)
        questions = self._skewed(10_000, 1.0)
        errors: list[str] = []

        async def repeat() -> None:
            while time.monotonic() < until_s:
                tenant, question = rng.choice(TENANTS).name, questions.pop().question
                answer = await self._ask(tenant, question, time.monotonic())
                if not answer.error:
                    ends_s.append(time.monotonic())
                elif answer.status in _REFUSALS:
                    await asyncio.sleep(RETRY_S)
                else:
                    errors.append(answer.error)

        await asyncio.gather(*(repeat() for _ in range(num_waiting)))
        if errors:
            say(f"to know the capacity: {len(errors)} errors, such as {errors[0]}")
        return sum(until_s - seconds / 2 < one <= until_s for one in ends_s) / (seconds / 2)

    async def run(self, rates: dict[str, float], seconds: float, from_s: float) -> Run:
        """Ask at some rates by tenant, in questions per second."""
        began_s = time.monotonic() + 0.2
        questions: list[tuple[str, Asked]] = []
        for name, rate in rates.items():
            asked = self._skewed(math.ceil(2 * rate * seconds) + 20, rate)
            questions += [(name, one) for one in asked if one.at_s <= seconds]
        answers = await asyncio.gather(
            *(self._ask(name, one.question, began_s + one.at_s) for name, one in questions)
        )
        pairs = zip(questions, answers, strict=True)
        seen = [Seen(name, asked.at_s, answer) for (name, asked), answer in pairs]
        behind_s = max(one.behind_s for one in answers)
        say(f"{len(seen)} questions, sent at most {behind_s:.3f} s late")
        return Run(seen, from_s, seconds)

    def _skewed(self, number: int, per_s: float) -> list[Asked]:
        self._seed += 1
        return skewed(self._texts, number, per_s, self._seed)

    async def _ask(self, tenant: str, question: str, at_s: float) -> Answered:
        system = f"Question {next(self._numbers)}. Answer from the documents."
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ]
        body = {"messages": messages, **self._fields}
        return await ask(self._port, CHAT, body, at_s, headers(tenant))


def rates(load: float, capacity: float) -> dict[str, float]:
    """Return the rates of all tenants; ``gold`` always asks the same."""
    gold = GOLD.share * capacity
    rest = (load * capacity - gold) / len(SHARING)
    return {GOLD.name: gold} | {one.name: rest for one in SHARING}


def start(platform: Platform, times: EngineTimes, known: QuestionSet, limit_s: float) -> int:
    """Start all parts, and put the documents. Return the gateway's port."""
    platform.start("retriever")
    platform.start("cachestore")
    platform.wait("cachestore")
    platform.simulate_engines(times)
    platform.wait("retriever", *(engine.name for engine in platform.of("engine")))
    port = platform.start_gateway(
        write_keys(platform.data / "keys.toml"),
        ADMIN,
        RAGCACHE_SLO_FIRST_TOKEN_MS=str(round(1e3 * limit_s)),
    )
    rest = Rest(f"http://127.0.0.1:{port}", headers(ADMIN))
    rest.put_collection(known.name, {}, known.documents)
    rest.close()
    return port


async def measure(client: Client, sizes: Sizes, limit_s: float) -> dict[str, Any]:
    """Measure all loads."""
    capacity = await client.capacity(sizes.capacity_s, WAITING * sizes.engines)
    say(f"capacity: {capacity:.2f} answers per second")
    ramp_s = RAMP_LIMITS * limit_s
    alone = {GOLD.name: GOLD.share * capacity}
    unloaded = await client.run(alone, sizes.unloaded_s, 0.0)
    peaks = {
        load: await client.run(rates(load, capacity), ramp_s + sizes.peak_s, ramp_s)
        for load in sizes.peak_loads
    }
    overload = await client.run(rates(OVERLOAD, capacity), ramp_s + sizes.overload_s, ramp_s)
    runs = {"unloaded": unloaded, **{f"load {load:g}": run for load, run in peaks.items()}}
    runs["overload"] = overload
    shares = overload.shares()
    errors = {GOLD.name: overload.refused_share(GOLD.name)}
    for one in SHARING:
        own = one.share / sum(other.share for other in SHARING)
        errors[one.name] = abs(shares[one.name] / own - 1)
    p90 = [float(np.quantile(run.first_times(GOLD.name), 0.9)) for run in (overload, unloaded)]
    peak = max(run.goodput(limit_s) for run in peaks.values())
    others = [error for run in runs.values() for error in run.other_errors()]
    for error in others[:3]:
        say(f"error: {error}")
    return {
        "high_ttft_p90_over_unloaded": round(p90[0] / p90[1], 3),
        "goodput_over_peak": round(overload.goodput(limit_s) / peak, 3),
        "max_share_error": round(max(errors.values()), 3),
        "other_errors": len(others),
        "share_errors": {name: round(error, 4) for name, error in errors.items()},
        "capacity_per_s": round(capacity, 3),
        "limit_s": round(limit_s, 3),
        "runs": {name: run.summary(limit_s) for name, run in runs.items()},
    }


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure what the command line asks for."""
    started_s = time.monotonic()
    sizes = QUICK if arguments.quick else FULL
    if arguments.scale:
        sizes = sizes.scaled(arguments.scale / sizes.scale)
    sizes = replace(sizes, engines=arguments.engines or sizes.engines)
    times = a100(LINK_GBITS, CACHE_TOKENS).scaled(sizes.scale)
    limit_s = LIMIT_FACTOR * times.profile.predict(0, PROMPT_TOKENS)
    known = known_questions(None, SEED)
    spec = PlatformSpec(simulated_model(folder / "model"), sizes.engines)
    with processes.platform(spec, folder / "platform") as platform:
        port = start(platform, times, known, limit_s)
        say(f"started after {time.monotonic() - started_s:.0f} s")
        figures = asyncio.run(measure(Client(port, known), sizes, limit_s))
    took_s = round(time.monotonic() - started_s, 1)
    return figures | {"sizes": asdict(sizes), "took_s": took_s}


def main() -> None:
    parser = options(__doc__, "four engines and short loads; under 50 s")
    parser.add_argument("--engines", type=int, help="simulated engines")
    parser.add_argument("--scale", type=float, help="factor of all times; more needs less CPU")
    arguments = parser.parse_args()
    print_figures(lambda folder: run(arguments, folder))


if __name__ == "__main__":
    main()
