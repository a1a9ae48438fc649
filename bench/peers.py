"""Compares a platform whose parts prove to each other who they are with one whose parts do not.

All parts are real processes on loopback: a gateway, stand-ins of the retriever and of the engine's
records with the servers of the real ones, and a simulated engine that answers at once. ``secure``
has signing keys and certificates: each call carries a token, each connection of the data port a
proof, and all connections are encrypted with TLS. ``plain`` has neither. A question retrieves 8
chunks of 250 tokens. Both are asked in short turns.

- ``secure_over_plain``: answers a second of secure over plain, of the median turns, and its 95 %
  interval by a bootstrap over the turns. ``plain_over_secure_cpu`` compares the CPU time of a
  question in the gateway and the stand-ins, which other programs on the machine change less.
- ``data_port_bytes_per_s``: values of 8 MiB that a client reads from the secure store over TCP, and
  ``data_port_plain_bytes_per_s`` from the plain one; ``data_port_secure_over_plain`` is the ratio.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop

from bench.contestants.ours import RagCacheSocket
from bench.support.comparison import interval
from bench.support.gateway_load.simulated_parts import (
    HOST,
    chat_request,
    run_answers,
    simulated_parts,
    wait_for_gateway,
)
from bench.support.program import is_quick, print_figures
from harness.processes import Service, free_port
from ragcache_cli.local.key_files import certificate_files

QUESTIONS: Final = 16
"""Questions of one turn."""

CONNECTIONS: Final = 4
WARM_UP_TURNS: Final = 5
QUICK_TURNS, FULL_TURNS = 60, 500
READS, QUICK_READS, FULL_READS = 16, 12, 80
VALUE_BYTES: Final = 8 << 20


def main() -> None:
    quick = is_quick(__doc__, "fewer turns")
    print_figures(lambda folder: measure(folder, quick=quick))


def measure(folder: Path, *, quick: bool) -> dict[str, Any]:
    keys, certificates = folder / "keys", folder / "tls"
    keys.write_text(f"{'a1' * 32}\n")
    secure = {"RAGCACHE_SIGNING_KEY_FILE": str(keys), "RAGCACHE_TLS_DIR": str(certificates)}
    with certificate_files(certificates, "bench.ragcache.internal"):
        answered = uvloop.run(measure_answers(folder, secure, QUICK_TURNS if quick else FULL_TURNS))
        return answered | measure_reads(folder, secure, QUICK_READS if quick else FULL_READS)


async def measure_answers(
    folder: Path, secure: Mapping[str, str], num_turns: int
) -> dict[str, Any]:
    """Return the figures of answers. Each turn asks both platforms, in alternating order."""
    settings: Mapping[str, Mapping[str, str]] = {
        "plain": {},
        "secure": secure,
    }
    with ExitStack() as stack:
        requests: dict[str, tuple[int, bytes]] = {}
        measured: dict[str, list[Service]] = {}
        for name, given in settings.items():
            (folder / name).mkdir()
            parts = stack.enter_context(simulated_parts(folder / name, **given))
            port = free_port()
            gateway = parts.start_gateway("gateway", port, RAGCACHE_LOG_LEVEL="error")
            wait_for_gateway(gateway, port)
            await parts.set_rate(10_000)
            fields = {"collection": "chunks-250", "top_k": 8}
            measured[name] = [parts.services["stand_ins"], gateway]
            requests[name] = port, chat_request(port, max_tokens=1, ragcache=fields)
        seconds: dict[str, list[float]] = {name: [] for name in settings}
        errors, cpu_s = 0, {}
        for turn in range(num_turns + WARM_UP_TURNS):
            if turn == WARM_UP_TURNS:
                cpu_s = {name: used_s(services) for name, services in measured.items()}
            for name in sorted(settings, reverse=turn % 2 == 1):
                began = time.perf_counter()
                errors += await run_answers(HOST, *requests[name], QUESTIONS, CONNECTIONS)
                if turn >= WARM_UP_TURNS:
                    seconds[name].append(time.perf_counter() - began)
        plain_s, secure_s = np.array(seconds["plain"]), np.array(seconds["secure"])
        cpu_s = {name: used_s(services) - cpu_s[name] for name, services in measured.items()}

        def ratio(rows: Any) -> float:
            return float(np.median(plain_s[rows]) / np.median(secure_s[rows]))

        ends = interval(ratio, num_turns)
        return {
            "secure_over_plain": round(ratio(slice(None)), 4),
            "secure_over_plain_interval": [round(end, 4) for end in ends],
            "plain_over_secure_cpu": round(cpu_s["plain"] / cpu_s["secure"], 4),
            "cpu_us_per_question": {
                name: round(1e6 * used / QUESTIONS / num_turns) for name, used in cpu_s.items()
            },
            "answers_per_s": {
                name: round(QUESTIONS / float(np.median(found)), 1)
                for name, found in seconds.items()
            },
            "questions": QUESTIONS * num_turns,
            "errors": errors,
        }


def used_s(services: Sequence[Service]) -> float:
    return sum(one.cpu_s() for one in services)


def measure_reads(folder: Path, secure: Mapping[str, str], num_turns: int) -> dict[str, Any]:
    """Return the figures of the data port. Each turn reads from both stores."""
    buffer = memoryview(bytearray(VALUE_BYTES))
    value = memoryview(np.random.default_rng(0).bytes(VALUE_BYTES))
    with ExitStack() as stack:
        stores = {}
        peers: Mapping[str, Mapping[str, str]] = {"plain": {}, "secure": secure}
        for name, given in peers.items():
            (folder / f"{name}-store").mkdir()
            store = stack.enter_context(closing(RagCacheSocket(folder / f"{name}-store", given)))
            for number in range(READS):
                store.put(number, value)
            store.settle()
            stores[name] = store
        seconds: dict[str, list[float]] = {name: [] for name in stores}
        for turn in range(num_turns):
            for name in sorted(stores, reverse=turn % 2 == 1):
                began = time.perf_counter()
                for number in range(READS):
                    stores[name].get(number, buffer)
                seconds[name].append(time.perf_counter() - began)
    plain_s, secure_s = (float(np.median(seconds[name])) for name in ("plain", "secure"))
    return {
        "data_port_bytes_per_s": round(READS * VALUE_BYTES / secure_s),
        "data_port_plain_bytes_per_s": round(READS * VALUE_BYTES / plain_s),
        "data_port_secure_over_plain": round(plain_s / secure_s, 4),
    }


if __name__ == "__main__":
    main()
