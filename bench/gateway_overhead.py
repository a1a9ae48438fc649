"""Measures what the gateway itself costs, in front of an engine that costs next to nothing.

The gateway is the real process. The engine is simulated: it speaks vLLM's streaming API and writes
one token per stream and tick. Retriever and the engine's records are gRPC servers with fixed
answers. All processes and the client share this machine, so the CPU of each one is reported.

Latencies are differences to the same client directly at the engine, in alternating rounds:

- ``added_p50_ms``, ``added_p99_ms``: of the time to the first token, at 32 streams; and of each
  later token, ``token_added_p50_ms`` and ``token_added_p99_ms``.
- ``inter_token_p99_excess_ms``: the p99 of the time between two tokens, at ``streams`` streams of
  20 tokens/s that are held for ``held_s`` seconds; ``streams_errors`` counts those that failed.
  With all 2,000 streams it is also named ``streams_2000_errors``. ``cpu_us_per_token`` is the
  gateway's CPU time of these streams over their tokens, their beginnings and ends included.
- ``requests_per_s_per_core``: answers in one piece of 16 tokens per CPU second of the gateway.
- ``memory_100k_over_10k``: resident memory after ``memory_requests[1]`` requests over that after
  ``memory_requests[0]``. A quick run names it by its own numbers of requests. ``memory_mib`` has
  the memory after each ``memory_requests[0]`` requests.
- ``cpu_50k_over_2k_prompt``: the gateway's CPU time of a request with 8 retrieved chunks, of 6,250
  tokens each over 250 tokens each.

Requests are without retrieval (``ragcache.retrieve`` is false), but for those of the last two.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.support.gateway_load.simulated_parts import (
    HOST,
    SimulatedParts,
    StreamTimes,
    chat_request,
    http_request,
    run_answers,
    run_streams,
    simulated_parts,
    wait_for_gateway,
)
from bench.support.program import options, print_figures
from harness.processes import Service, free_port

NUM_STREAMS = 32
TOKENS_PER_S = 20
ANSWER_TOKENS = 16
CHUNKS = 8
SHORT_CHUNK_TOKENS, LONG_CHUNK_TOKENS = 250, 6250


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        rounds: Rounds at 32 streams, each of ``round_tokens`` tokens.
        many: Streams that are held for ``held_s`` seconds.
        requests: Complete answers of one measurement of CPU time.
        memory: Requests after which memory is read, the first and the second time.
    """

    rounds: int
    round_tokens: int
    many: int
    held_s: int
    requests: int
    memory: tuple[int, int]


FULL = Sizes(10, 60, 2000, 60, 4000, (10_000, 100_000))
QUICK = Sizes(3, 20, 200, 5, 400, (400, 2_000))


@dataclass(frozen=True, slots=True)
class Running:
    """The processes under measurement."""

    gateway: Service
    parts: SimulatedParts
    port: int

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time that each process has used, in seconds."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            **{name: service.cpu_s() for name, service in self.parts.services.items()},
            "client": used.ru_utime + used.ru_stime,
        }

    def chat(self, max_tokens: int = ANSWER_TOKENS, **fields: Any) -> bytes:
        return chat_request(self.port, max_tokens=max_tokens, **fields)

    def chat_with_chunks(self, chunk_tokens: int) -> bytes:
        collection = {"collection": f"chunks-{chunk_tokens}", "top_k": CHUNKS}
        return self.chat(ragcache=collection)

    def streams(self, max_tokens: int) -> dict[str, tuple[int, bytes]]:
        """Return port and request of a stream at the engine itself, and through the gateway."""
        port = self.parts.engine_port
        body = {"model": "tiny", "prompt": [1] * 100, "max_tokens": max_tokens, "stream": True}
        return {
            "direct": (port, http_request(port, "/v1/completions", body)),
            "gateway": (self.port, self.chat(max_tokens, stream=True)),
        }

    async def ask(self, request: bytes, count: int, connections: int = 32) -> int:
        """Ask for complete answers; return how many failed."""
        return await run_answers(HOST, self.port, request, count, connections)


class Meter:
    """The CPU time of all processes from now on."""

    def __init__(self, processes: Running) -> None:
        self._processes = processes
        self._before, self._began_s = processes.cpu_s(), time.monotonic()

    def passed_s(self) -> float:
        return time.monotonic() - self._began_s

    def gateway_s(self) -> float:
        return self._processes.cpu_s()["gateway"] - self._before["gateway"]

    def cores(self) -> dict[str, float]:
        """Return the cores that each process has used."""
        passed_s, now = self.passed_s(), self._processes.cpu_s()
        return {
            name: round((now[name] - used) / passed_s, 3) for name, used in self._before.items()
        }


async def measure_few(processes: Running, sizes: Sizes) -> dict[str, Any]:
    """Measure what 32 streams wait longer than at the engine itself."""
    await processes.parts.set_rate(TOKENS_PER_S)
    streams = processes.streams(sizes.round_tokens)
    await run_streams(HOST, *streams["gateway"], NUM_STREAMS, StreamTimes(), spread_s=1.0)
    times = {name: StreamTimes() for name in streams}
    meter = Meter(processes)
    for _ in range(sizes.rounds):
        for name, (port, request) in streams.items():
            await run_streams(HOST, port, request, NUM_STREAMS, times[name], spread_s=1.0)
    through, direct = times["gateway"], times["direct"]
    return {
        "added_p50_ms": added_ms(through.first, direct.first, 0.5),
        "added_p99_ms": added_ms(through.first, direct.first, 0.99),
        "token_added_p50_ms": added_ms(through.delays, direct.delays, 0.5),
        "token_added_p99_ms": added_ms(through.delays, direct.delays, 0.99),
        "few_errors": through.errors + direct.errors,
        "few_cores": meter.cores(),
    }


async def measure_many(processes: Running, sizes: Sizes) -> dict[str, Any]:
    """Hold many streams, first at the engine itself and then through the gateway."""
    await processes.parts.set_rate(TOKENS_PER_S)
    times, cores, tokens_per_s, gateway_s = {}, {}, {}, 0.0
    for name, (port, request) in processes.streams(TOKENS_PER_S * sizes.held_s).items():
        times[name], meter = StreamTimes(), Meter(processes)
        await run_streams(HOST, port, request, sizes.many, times[name], sizes.many / 200)
        cores[name], gateway_s = meter.cores(), meter.gateway_s()
        tokens_per_s[name] = round(len(times[name].gaps) / meter.passed_s())
    through, direct = times["gateway"], times["direct"]
    return {
        "streams": sizes.many,
        "held_s": sizes.held_s,
        "streams_errors": through.errors,
        **({"streams_2000_errors": through.errors} if sizes.many == FULL.many else {}),
        "inter_token_p99_excess_ms": added_ms(through.gaps, direct.gaps, 0.99),
        "tokens_per_s": tokens_per_s["gateway"],
        "cpu_us_per_token": round(1e6 * gateway_s / max(1, len(through.gaps))),
        "direct_tokens_per_s": tokens_per_s["direct"],
        "many_cores": cores["gateway"],
        "many_direct_cores": cores["direct"],
    }


async def measure_requests(processes: Running, sizes: Sizes) -> dict[str, Any]:
    """Count complete answers per CPU second of the gateway."""
    await processes.parts.set_rate(1000)
    await processes.ask(processes.chat(), sizes.requests // 4)
    meter = Meter(processes)
    failed = await processes.ask(processes.chat(), sizes.requests)
    return {
        "requests_per_s_per_core": round(sizes.requests / meter.gateway_s()),
        "requests_per_s": round(sizes.requests / meter.passed_s()),
        "requests_errors": failed,
        "requests_cores": meter.cores(),
    }


async def measure_prompts(processes: Running, sizes: Sizes) -> dict[str, Any]:
    """Compare the CPU time of requests with short and with long chunks, in alternating rounds."""
    await processes.parts.set_rate(1000)
    used_s: dict[int, list[float]] = {SHORT_CHUNK_TOKENS: [], LONG_CHUNK_TOKENS: []}
    num_requests = max(sizes.requests // 8, 50)
    failed = 0
    for is_warm in (False, True, True, True, True):
        for chunk_tokens, found_s in used_s.items():
            request = processes.chat_with_chunks(chunk_tokens)
            meter = Meter(processes)
            failed += await processes.ask(request, num_requests, connections=4)
            if is_warm:
                found_s.append(meter.gateway_s() / num_requests)
    short_s, long_s = (statistics.median(found_s) for found_s in used_s.values())
    return {
        "cpu_50k_over_2k_prompt": round(long_s / short_s, 3),
        "cpu_2k_ms": round(1e3 * short_s, 3),
        "cpu_50k_ms": round(1e3 * long_s, 3),
        "prompts_errors": failed,
    }


async def measure_memory(processes: Running, sizes: Sizes) -> dict[str, Any]:
    """Compare resident memory after few and after many requests."""
    await processes.parts.set_rate(1000)
    first, second = sizes.memory
    request = processes.chat_with_chunks(SHORT_CHUNK_TOKENS)
    gateway = psutil.Process(processes.gateway.pid)
    failed, curve = 0, []
    for _ in range(second // first):
        failed += await processes.ask(request, first)
        curve.append(gateway.memory_info().rss)
    # The name says what was measured: a quick run measures fewer requests.
    name = "100k_over_10k" if sizes.memory == FULL.memory else f"{second}_over_{first}"
    return {
        "memory_requests": [first, second],
        f"memory_{name}": round(curve[-1] / curve[0], 4),
        "memory_mib": [round(one / (1 << 20)) for one in curve],
        "memory_errors": failed,
    }


PARTS = {
    "few": measure_few,
    "many": measure_many,
    "requests": measure_requests,
    "prompts": measure_prompts,
    "memory": measure_memory,
}


def added_ms(through: Sequence[float], direct: Sequence[float], quantile: float) -> float:
    """Return the difference of two quantiles, in milliseconds."""
    return round(1e3 * (_quantile(through, quantile) - _quantile(direct, quantile)), 3)


def _quantile(values: Sequence[float], quantile: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def run(parts: Sequence[str], sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Run the gateway with a simulated engine and stand-ins, and measure."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 16_384)), hard))
    gateway_port = free_port()
    results: dict[str, Any] = {}
    with simulated_parts(folder) as simulated:
        gateway = simulated.start_gateway("gateway", gateway_port)
        wait_for_gateway(gateway, gateway_port)
        for part in parts:
            results |= uvloop.run(PARTS[part](Running(gateway, simulated, gateway_port), sizes))
    return results


def main() -> None:
    parser = options(__doc__, "fewer and shorter streams")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    given = parser.parse_args()
    print_figures(lambda folder: run(given.only, QUICK if given.quick else FULL, folder))


if __name__ == "__main__":
    main()
