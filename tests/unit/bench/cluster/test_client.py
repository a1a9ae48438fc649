"""Arrivals, what the client reads of answers, and the figures of a comparison."""

from __future__ import annotations

import asyncio
import json
import math
from itertools import pairwise

import pytest

from bench.support.cluster.figures import OURS, max_wait_over_mean, ratios
from bench.support.cluster.open_loop import TIMEOUT_S, Answered, AnswerReader, poisson_times
from bench.support.cluster.questions import skewed
from bench.support.cluster.rivals import RIVALS


def test_arrivals_are_a_poisson_process() -> None:
    times = poisson_times(4000, 5.0, 0)
    gaps = [after - before for before, after in pairwise(times)]
    mean_s = sum(gaps) / len(gaps)
    assert abs(mean_s - 0.2) < 0.02
    spread = math.sqrt(sum((gap - mean_s) ** 2 for gap in gaps) / len(gaps))
    assert abs(spread / mean_s - 1) < 0.1
    assert times == poisson_times(4000, 5.0, 0)


def test_few_questions_are_asked_often() -> None:
    asked = [one.question for one in skewed([str(i) for i in range(100)], 2000, 1.0, 0)]
    hottest = sum(asked.count(str(i)) for i in range(10))
    assert 0.5 < hottest / len(asked) < 0.65


class FakeTransport(asyncio.Transport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def close(self) -> None:
        pass


def read(parts: list[bytes], status: bytes = b"200 OK") -> Answered:
    async def run() -> Answered:
        done: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        reader = AnswerReader(b"", 0.0, done)
        reader.connection_made(FakeTransport())
        reader.data_received(b"HTTP/1.1 %b\r\ntransfer-encoding: chunked\r\n\r\n" % status)
        for part in parts:
            reader.data_received(b"%x\r\n%b\r\n" % (len(part), part))
        reader.data_received(b"0\r\n\r\n")
        reader.connection_lost(None)
        return await done

    return asyncio.run(run())


def event(value: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


ROLE = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
TOKEN = event({"choices": [{"delta": {"content": "word"}}]})
ACCOUNT = event({"choices": [], "ragcache": {"timing_ms": {"queue": 5.0}}})


def test_an_answer_is_read_whatever_its_parts_are() -> None:
    whole = ROLE + TOKEN + ACCOUNT + b"data: [DONE]\n\n"
    for size in (1, 7, len(whole)):
        found = read([whole[i : i + size] for i in range(0, len(whole), size)])
        assert not found.error
        assert found.first_s <= found.total_s < math.inf
        assert found.wait_s == 0.005


@pytest.mark.parametrize(
    ("parts", "status"),
    [([ROLE], b"200 OK"), ([TOKEN], b"503 Away"), ([event({"error": "lost"}), TOKEN], b"200 OK")],
)
def test_a_failed_answer_counts_as_infinite(parts: list[bytes], status: bytes) -> None:
    found = read(parts, status)
    assert found.error
    assert math.isinf(found.first_s)


def answered(first_s: float, engine: str = "a", wait_s: float = 0.0) -> Answered:
    details = {"explanation": {"engine": engine}, "timing_ms": {"queue": 1e3 * wait_s}}
    return Answered(first_s, first_s, details=details)


def test_ratios_are_of_the_rivals_over_ours() -> None:
    times = [0.1 * i for i in range(1, 21)]
    found = {name: [answered(2 * s) for s in times] for name in RIVALS}
    found[OURS] = [answered(s) for s in times]
    found["sticky"] = [Answered() for _ in times]
    figures = ratios(found, slo_s=1.05)
    assert figures["ttft_p50_round_robin_over_ours"] == 2.0
    assert figures["goodput_round_robin_over_ours"] == 0.5
    assert figures["ttft_p90_sticky_over_ours"] > TIMEOUT_S / 2
    assert figures["goodput_sticky_over_ours"] == 0.0


def test_the_longest_wait_is_that_of_one_engine() -> None:
    found = [answered(1, "a", 0.1)] * 3 + [answered(1, "b", 0.5)]
    longest, by_chance = max_wait_over_mean(found)
    assert longest == 2.5
    assert 1 < by_chance < longest
