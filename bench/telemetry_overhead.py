"""Compares a gateway with all telemetry on with one that has none.

All gateways are real processes in front of the same simulated engine and the same stand-ins of the
retriever and the engine's records. ``on`` has metrics, which are scraped every second as Prometheus
does, JSON logs, and OTLP exports of metrics and of a tenth of the traces to a receiver on loopback.
``off`` records no metric, logs errors alone and exports nothing. ``control`` is another process
that is started as ``off`` is. Two such processes differ too, and the quotient of ``control`` over
``off`` says how far the figures can be trusted. Other quotients are of ``on`` over both together.

A client asks one question of each gateway, in a random order, again and again. A question retrieves
8 chunks of 250 tokens and streams its answer. Two cases are measured:

- *realistic*: the engine takes 50 ms to the first token, and 4 questions are asked at once.
  ``p50_ratio_on_over_off`` is the quotient of the medians of the time to the first token (TTFT).
  ``p50_ratio_interval`` is its 95 % interval by a bootstrap over the rounds of questions.
  ``cpu_ratio_on_over_off`` is that of the gateways' CPU time, scrapes and exports included.
- *bare*: the engine answers at once, one question at a time. Names begin with ``bare_``, and
  ``bare_added_p50_us`` is the difference of the medians.

``scrape_cpu_ms`` is the gateway's CPU time for one scrape, a part of ``cpu_ratio_on_over_off``.
``count_chunks_us`` is what keeping and counting the chunks of an answer costs in each request, and
``explanation_us`` what an explanation costs that a client asks for, both with 8 chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.support.gateway_load.explained_prompts import counting_us, explanation_us
from bench.support.gateway_load.simulated_parts import (
    HOST,
    SimulatedParts,
    chat_request,
    cpu_s,
    simulated_parts,
    wait_for_gateway,
)
from bench.support.gateway_load.stream_client import StreamTimes, run_streams
from bench.support.processes import Service, free_port
from bench.support.sequences.bootstrap import interval
from tests.kit.telemetry import Collector, collector

CHUNKS: Final = 8
CHUNK_TOKENS: Final = 250
ANSWER_TOKENS: Final = 8
TOKENS_PER_S: Final = 1000
FIRST_TOKEN_S: Final = 0.05
STREAMS: Final = 4
TRACED_SHARE: Final = 0.1
SCRAPE_INTERVAL_S: Final = 1.0
TIMED_SCRAPES: Final = 30
WARM_UP_ROUNDS: Final = 40
COUNTED_ANSWERS: Final = 1000
ACCEPT: Final = "application/openmetrics-text;version=1.0.0"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many questions each gateway gets, with the engine's time and without it."""

    realistic: int
    bare: int


FULL = Sizes(4000, 4000)
QUICK = Sizes(160, 120)


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    service: Service
    port: int

    def cpu_s(self) -> float:
        """Return the CPU time that it has used, in seconds."""
        return cpu_s(self.service.pid)

    def request(self) -> bytes:
        """Return the bytes of a question."""
        collection = {"collection": f"chunks-{CHUNK_TOKENS}", "top_k": CHUNKS}
        return chat_request(self.port, max_tokens=ANSWER_TOKENS, stream=True, ragcache=collection)


@dataclass(frozen=True, slots=True)
class Compared:
    """What one case measured.

    Args:
        first_token_s: TTFT of each question, in the order of the rounds, by gateway.
        cpu_s: CPU time by gateway.
        errors: Questions that failed. Their rounds are left out.
    """

    first_token_s: Mapping[str, list[float]]
    cpu_s: Mapping[str, float]
    errors: int

    def figures(self) -> dict[str, Any]:
        """Return the figures of the case."""
        times_s = {name: np.array(found) for name, found in self.first_token_s.items()}
        p50_s = {name: float(np.median(found)) for name, found in times_s.items()}
        on_s, without_s = times_s["on"], np.array([times_s["off"], times_s["control"]])
        rounds = len(on_s)
        without_p50_s = float(np.median(without_s))
        without_cpu_s = (self.cpu_s["off"] + self.cpu_s["control"]) / 2
        ends = interval(
            lambda rows: float(np.median(on_s[rows]) / np.median(without_s[:, rows])), rounds
        )
        return {
            "p50_ratio_on_over_off": round(p50_s["on"] / without_p50_s, 4),
            "p50_ratio_interval": [round(end, 4) for end in ends],
            "control_p50_ratio": round(p50_s["control"] / p50_s["off"], 4),
            "cpu_ratio_on_over_off": round(self.cpu_s["on"] / without_cpu_s, 3),
            "control_cpu_ratio": round(self.cpu_s["control"] / self.cpu_s["off"], 3),
            "added_p50_us": round(1e6 * (p50_s["on"] - without_p50_s)),
            "p50_ms": {name: round(1e3 * value, 3) for name, value in p50_s.items()},
            "p99_ms": {
                name: round(1e3 * float(np.quantile(found, 0.99)), 3)
                for name, found in times_s.items()
            },
            "cpu_us_per_question": {
                name: round(1e6 * value / rounds) for name, value in self.cpu_s.items()
            },
            "rounds": rounds,
            "errors": self.errors,
        }


@dataclass(slots=True)
class Scrapes:
    """Reads a metrics page every SCRAPE_INTERVAL_S while its context is entered.

    Args:
        port: Port of the page.
    """

    port: int
    count: int = 0
    num_bytes: int = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Scrape until the block ends."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self.scrape()
            await asyncio.sleep(SCRAPE_INTERVAL_S)

    async def scrape(self) -> bytes:
        """Read the page once."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        head = f"GET /metrics HTTP/1.1\r\nhost: {HOST}\r\naccept: {ACCEPT}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode())
        page = await reader.read(-1)
        writer.close()
        self.count += 1
        self.num_bytes = len(page)
        return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer questions")
    sizes = QUICK if parser.parse_args().quick else FULL
    with (
        tempfile.TemporaryDirectory() as folder,
        simulated_parts(Path(folder)) as parts,
        collector() as received,
    ):
        results = uvloop.run(measure(parts, received, sizes))
    print(json.dumps(results))


async def measure(parts: SimulatedParts, received: Collector, sizes: Sizes) -> dict[str, Any]:
    """Measure both cases."""
    gateways, scrapes = start_gateways(parts, received.url)
    await parts.set_rate(TOKENS_PER_S)
    await compare(gateways, WARM_UP_ROUNDS, STREAMS)
    async with scrapes.running():
        await parts.set_first_token(FIRST_TOKEN_S)
        realistic = await compare(gateways, sizes.realistic, STREAMS)
        await parts.set_first_token(0.0)
        bare = await compare(gateways, sizes.bare, 1)
    scrape_cpu_s = await cpu_of_scrapes(gateways["on"], scrapes)
    on = gateways["on"].service
    lines = on.log.read_text().splitlines()
    on.stop()  # it exports what is left
    questions = WARM_UP_ROUNDS + sizes.realistic + sizes.bare
    answered = sum('"route": "/v1/chat/completions"' in line for line in lines)
    return {
        **realistic.figures(),
        "first_token_ms": round(1e3 * FIRST_TOKEN_S),
        **{f"bare_{name}": value for name, value in bare.figures().items()},
        "count_chunks_us": counting_us(CHUNKS, COUNTED_ANSWERS),
        "explanation_us": explanation_us(CHUNKS, COUNTED_ANSWERS),
        "scrape_cpu_ms": round(1e3 * scrape_cpu_s, 2),
        "scrapes": scrapes.count,
        "scraped_bytes": scrapes.num_bytes,
        "log_lines_per_question": round(answered / questions, 2),
        "traced_share": round(len({one.trace_id for one in received.spans()}) / questions, 3),
        "metric_exports": len(received.metrics()),
    }


async def cpu_of_scrapes(gateway: Gateway, scrapes: Scrapes) -> float:
    """Return the CPU time of a gateway for one scrape, in seconds."""
    before_s = gateway.cpu_s()
    for _ in range(TIMED_SCRAPES):
        await scrapes.scrape()
    return (gateway.cpu_s() - before_s) / TIMED_SCRAPES


def start_gateways(parts: SimulatedParts, otlp_endpoint: str) -> tuple[dict[str, Gateway], Scrapes]:
    """Start the gateways by name, and return them with the scrapes of the one with telemetry.

    Args:
        otlp_endpoint: Base URL of the receiver.
    """
    metrics_port = free_port()
    unmeasured = ("-m", "bench.support.gateway_load.unmeasured_gateway")
    silent = {"RAGCACHE_LOG_LEVEL": "error"}
    telemetry = {
        "RAGCACHE_METRICS_LISTEN": f"{HOST}:{metrics_port}",
        "RAGCACHE_LOG_FORMAT": "json",
        "RAGCACHE_OTLP_ENDPOINT": otlp_endpoint,
        "RAGCACHE_TRACE_SAMPLE_RATIO": str(TRACED_SHARE),
    }
    ports = {name: free_port() for name in ("off", "on", "control")}
    started = {
        "off": parts.start_gateway("off", ports["off"], unmeasured, **silent),
        "on": parts.start_gateway("on", ports["on"], **telemetry),
        "control": parts.start_gateway("control", ports["control"], unmeasured, **silent),
    }
    gateways = {name: Gateway(service, ports[name]) for name, service in started.items()}
    for gateway in gateways.values():
        wait_for_gateway(gateway.service, gateway.port)
    return gateways, Scrapes(metrics_port)


async def compare(gateways: Mapping[str, Gateway], num_rounds: int, num_streams: int) -> Compared:
    """Ask rounds of questions, one of each gateway, in an order that a seed draws.

    Args:
        num_streams: Rounds at once.
    """
    draw = random.Random(num_rounds)
    requests = {name: gateway.request() for name, gateway in gateways.items()}
    first_token_s: dict[str, list[float]] = {name: [] for name in gateways}
    errors = started = 0

    async def ask_rounds() -> None:
        nonlocal errors, started
        while started < num_rounds:
            started += 1
            answered = {}
            for name in draw.sample(list(gateways), len(gateways)):
                seen = StreamTimes()
                await run_streams(HOST, gateways[name].port, requests[name], 1, seen, 0.0)
                errors += seen.errors
                if not seen.errors:
                    answered[name] = seen.first[0]
            if len(answered) == len(gateways):
                for name, time_s in answered.items():
                    first_token_s[name].append(time_s)

    before_s = {name: gateway.cpu_s() for name, gateway in gateways.items()}
    await asyncio.gather(*(ask_rounds() for _ in range(num_streams)))
    used_s = {name: gateway.cpu_s() - before_s[name] for name, gateway in gateways.items()}
    return Compared(first_token_s, used_s, errors)


if __name__ == "__main__":
    main()
