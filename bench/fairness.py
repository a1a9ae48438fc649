"""Measures what one tenant's flood costs another tenant that asks once a second.

Gateway, retriever and cache store are the real processes. The engine is simulated, as in
``bench/cluster.py``, or vLLM with ``--real``. Tenant ``red`` has 400 connections. Each
sends its next request as soon as it has a response and ignores ``Retry-After``. Tenant ``blue``
asks once a second and comes again when ``Retry-After`` says. Its latency counts from the planned
time of a question to the end of its answer, with all waits between attempts. ``blue`` asks alone
and beside ``red`` in turns, with equal questions. The key file limits how many requests of a tenant
are answered at once (``max_concurrent``), with the same limit for both. Figures:

- ``other_tenant_p90_over_alone``: p90 of the latencies of ``blue`` beside ``red``, over that alone.
  A question without an answer counts as one of 120 s.
- ``first_token_p90_over_alone``: the same of the times to the first token.
- ``refused_share``: part of the questions of ``blue`` beside ``red`` that were refused at first.
- ``red``: responses to ``red`` by status, and how many came in a second.

``python -m bench.fairness [--quick] [--real]`` prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.support.answers.platform import Platform as Rest
from bench.support.answers.question_sets import QuestionSet
from bench.support.api_keys import headers, key
from bench.support.cluster import processes
from bench.support.cluster.engine_times import a100
from bench.support.cluster.open_loop import CHAT, TIMEOUT_S, Answered, ask
from bench.support.cluster.processes import Platform, PlatformSpec, simulated_model
from bench.support.cluster.questions import known_questions
from bench.support.gateway_load.simulated_parts import http_request
from bench.support.program import options, print_figures, say
from ragcache_core.access.key_file import hash_text

SEED: Final = 1
CONNECTIONS: Final = 400
TOP_K: Final = 3
ANSWER_TOKENS: Final = 16
MAX_CONCURRENT: Final = 1
LINK_GBITS: Final = 25.0
CACHE_TOKENS: Final = 200_000
SCALE: Final = 1.0
"""Of the times of the simulated engine."""

FLOOD_BEGINS_S: Final = 2.0
"""Time from the start of the flood to the first question that counts."""
ADMIN: Final = "admin"
TENANTS: Final = ("red", "blue")
_ROOT: Final = Path(__file__).resolve().parents[1]
TINYRAG: Final = _ROOT / "models" / "tinyrag" / "model"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: turns alone and turns beside the flood, and questions of each turn."""

    turns: int
    questions: int


FULL: Final = Sizes(5, 20)
QUICK: Final = Sizes(2, 6)


@dataclass(slots=True)
class Seen:
    """What ``blue`` saw, alone or beside the flood. Times are in seconds."""

    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    refused: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, planned_s: float, answer: Answered, attempts: int) -> None:
        """Add a question with its last answer."""
        self.refused += attempts > 1
        if answer.error:
            self.errors.append(answer.error)
        for times, took_s in ((self.first_s, answer.first_s), (self.total_s, answer.total_s)):
            times.append(TIMEOUT_S if math.isinf(took_s) else planned_s + took_s)

    def p90(self) -> tuple[float, float]:
        """Return the p90 of the times to the first token, and to the end."""
        first_s, total_s = (np.quantile(times, 0.9) for times in (self.first_s, self.total_s))
        return float(first_s), float(total_s)


def write_keys(file: Path) -> Path:
    """Write the keys of the tenants, and one that puts the documents."""
    entries = [f'[[keys]]\nname = "{ADMIN}"\nhash = "{hash_text(key(ADMIN))}"\nscopes = ["admin"]']
    for name in TENANTS:
        entries.append(
            f'[[keys]]\nname = "{name}"\nhash = "{hash_text(key(name))}"\nscopes = ["ask"]\n'
            f'tenant = "{name}"\n[[tenants]]\nname = "{name}"\nmax_concurrent = {MAX_CONCURRENT}'
        )
    file.write_text("\n".join(entries) + "\n")
    return file


class Blue:
    """The tenant that asks once a second and obeys."""

    def __init__(self, port: int, known: QuestionSet) -> None:
        self._port = port
        self._known = known

    async def turn(self, seen: Seen, numbers: Sequence[int]) -> None:
        """Ask questions by their numbers, one a second, and wait for all answers."""
        began_s = time.monotonic() + 0.1
        await asyncio.gather(
            *(self._ask(seen, number, began_s + i) for i, number in enumerate(numbers))
        )

    async def _ask(self, seen: Seen, number: int, planned_s: float) -> None:
        body = question(self._known, number) | {"stream": True}
        attempts, at_s = 0, planned_s
        while True:
            attempts += 1
            answer = await ask(self._port, CHAT, body, at_s, headers("blue"))
            waited_s = at_s - planned_s
            is_over = waited_s > TIMEOUT_S or answer.status == HTTPStatus.OK
            if is_over or not answer.retry_after_s:
                seen.add(waited_s, answer, attempts)
                return
            at_s = time.monotonic() + answer.retry_after_s


def question(known: QuestionSet, number: int) -> dict[str, Any]:
    """Return the body of a question that no engine has seen, by its number."""
    texts = known.questions
    return {
        "messages": [
            {"role": "system", "content": f"Question {number}. Answer from the documents."},
            {"role": "user", "content": texts[number % len(texts)].text},
        ],
        "max_tokens": ANSWER_TOKENS,
        "ragcache": {"collection": known.name, "top_k": TOP_K},
    }


def start(platform: Platform, known: QuestionSet, *, is_real: bool) -> int:
    """Start all parts, and put the documents. Return the gateway's port."""
    platform.start("retriever")
    platform.start("cachestore")
    platform.wait("cachestore")
    engines = platform.of("engine")
    if is_real:
        for engine in engines:
            platform.start(engine.name)
    else:
        platform.simulate_engines(a100(LINK_GBITS, CACHE_TOKENS).scaled(SCALE))
    platform.wait("retriever", *(engine.name for engine in engines))
    port = platform.start_gateway(write_keys(platform.data / "keys.toml"), ADMIN)
    rest = Rest(f"http://127.0.0.1:{port}", headers(ADMIN))
    rest.put_collection(known.name, {}, known.documents)
    rest.close()
    return port


def start_flood(port: int, known: QuestionSet, seconds: float, folder: Path) -> Any:
    """Start the process of ``red``."""
    file = folder / "request"
    file.write_bytes(http_request(port, CHAT, question(known, -1), headers("red")))
    words = [str(port), str(CONNECTIONS), str(seconds), str(file)]
    command = [sys.executable, "-m", "bench.support.gateway_load.flood", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=_ROOT)


async def measure(blue: Blue, sizes: Sizes, begin_flood: Any) -> dict[str, Any]:
    """Measure all turns."""
    alone, beside, red = Seen(), Seen(), Counter[str]()
    await blue.turn(Seen(), range(3))
    flood_s = FLOOD_BEGINS_S + sizes.questions + 1.0
    for turn in range(sizes.turns):
        first = 1000 + turn * sizes.questions
        await blue.turn(alone, range(first, first + sizes.questions))
        flood = begin_flood(flood_s)
        await asyncio.sleep(FLOOD_BEGINS_S)
        first += 100_000 * len(blue._known.questions)
        await blue.turn(beside, range(first, first + sizes.questions))
        output, _ = await asyncio.to_thread(flood.communicate)
        red.update(json.loads(output))
        say(f"turn {turn}: alone {alone.p90()}, beside {beside.p90()}, red {dict(red)}")
    for error in (*alone.errors, *beside.errors)[:3]:
        say(f"error: {error}")
    (alone_first_s, alone_s), (first_s, total_s) = alone.p90(), beside.p90()
    return {
        "other_tenant_p90_over_alone": round(total_s / alone_s, 3),
        "first_token_p90_over_alone": round(first_s / alone_first_s, 3),
        "refused_share": round(beside.refused / len(beside.total_s), 4),
        "errors": len(alone.errors) + len(beside.errors),
        "alone_p90_s": round(alone_s, 4),
        "beside_p90_s": round(total_s, 4),
        "red": dict(red) | {"per_s": round(red.total() / (sizes.turns * flood_s), 1)},
    }


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure what the command line asks for."""
    started_s = time.monotonic()
    sizes = QUICK if arguments.quick else FULL
    known = known_questions(None, SEED)
    model = TINYRAG if arguments.real else simulated_model(folder / "model")
    with processes.platform(PlatformSpec(model, 1), folder / "platform") as platform:
        port = start(platform, known, is_real=arguments.real)
        say(f"started after {time.monotonic() - started_s:.0f} s")

        def begin_flood(seconds: float) -> Any:
            return start_flood(port, known, seconds, folder)

        figures = asyncio.run(measure(Blue(port, known), sizes, begin_flood))
        cpu_s = {name: round(one.cpu_s(), 1) for name, one in platform.services.items()}
    took_s = round(time.monotonic() - started_s, 1)
    return figures | {"is_real": arguments.real, "cpu_s": cpu_s, "took_s": took_s}


def main() -> None:
    parser = options(__doc__, "few questions; under 50 s on the simulated engine")
    parser.add_argument("--real", action="store_true", help="an engine of vLLM")
    arguments = parser.parse_args()
    print_figures(lambda folder: run(arguments, folder))


if __name__ == "__main__":
    main()
