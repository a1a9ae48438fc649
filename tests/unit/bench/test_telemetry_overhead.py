"""The telemetry benchmark: its figures, and that its gateways differ as it says."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.support.gateway_load.simulated_engine import ClockedConnection, TokenClock
from bench.support.gateway_load.simulated_parts import HOST, StreamTimes, http_request, run_streams
from bench.telemetry_overhead import Compared

LIMIT_S = 60.0
RECORDS_NOTHING = """
from bench.support.gateway_load.unmeasured_gateway import record_nothing
from ragcache_gateway.telemetry.metrics import Metrics

def total(metrics):
    families = metrics.registry.collect()
    ours = (one for one in families if one.name.startswith(("ragcache", "gen_ai")))
    return sum(sample.value for one in ours for sample in one.samples if sample.value > 0)

def record(metrics):
    metrics.observe_first_token(1.0, "team-a")
    metrics.requests.labels("/v1/search", 200).inc()
    metrics.connections.set(3)
    metrics.chunks.add("cached", "")
    return total(metrics)

assert record(Metrics("tiny")) > 0
record_nothing()
assert record(Metrics("tiny")) == 0
"""


def compared(
    first_token_s: Mapping[str, list[float]], cpu_s: Mapping[str, float] | None = None
) -> Compared:
    return Compared(first_token_s, cpu_s or dict.fromkeys(first_token_s, 1.0), 0)


def test_ratios_are_over_both_gateways_without_telemetry() -> None:
    found = compared(
        {"off": [1.0, 2.0, 9.0], "on": [3.0, 2.1, 1.0], "control": [2.0, 1.0, 8.0]},
        {"off": 0.5, "on": 0.6, "control": 0.7},
    ).figures()
    assert found["p50_ratio_on_over_off"] == 1.05
    assert found["control_p50_ratio"] == 1.0
    assert found["added_p50_us"] == 100_000
    assert found["cpu_ratio_on_over_off"] == 1.0
    assert found["control_cpu_ratio"] == 1.4
    assert found["cpu_us_per_question"] == {"off": 166_667, "on": 200_000, "control": 233_333}
    assert found["rounds"] == 3


def test_the_interval_pairs_the_questions_of_a_round() -> None:
    off_s = [0.05 + 0.001 * n for n in range(50)]
    times_s = {"off": off_s, "on": [1.02 * one for one in off_s], "control": off_s}
    # Resampled together, the gateways keep their ratio; apart, their medians would not.
    assert compared(times_s).figures()["p50_ratio_interval"] == [1.02, 1.02]


def test_the_gateway_without_telemetry_records_no_metric() -> None:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", RECORDS_NOTHING],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first_token_s", [0.0, 0.2])
def test_the_simulated_engine_waits_before_the_first_token(first_token_s: float) -> None:
    async def first_of_one_stream() -> StreamTimes:
        loop = asyncio.get_running_loop()
        clock = TokenClock(loop)
        server = await loop.create_server(lambda: ClockedConnection(clock), HOST, 0)
        port = server.sockets[0].getsockname()[1]
        clock.tick_s = 0.001
        clock.start()
        for path, value in (("/first", first_token_s), ("/rate", 1000)):
            await post(port, path, value)
        times = StreamTimes()
        body = {"prompt": [1], "max_tokens": 3, "stream": True}
        request = http_request(port, "/v1/completions", body)
        await run_streams(HOST, port, request, 1, times, 0.0)
        server.close()
        return times

    async def post(port: int, path: str, value: float) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        content = str(value).encode()
        head = f"POST {path} HTTP/1.1\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()

    times = asyncio.run(asyncio.wait_for(first_of_one_stream(), LIMIT_S))
    assert times.errors == 0
    assert len(times.first) == 1
    assert len(times.gaps) == 2
    # The clock of timers has a resolution of some milliseconds.
    assert times.first[0] >= first_token_s - 0.02
