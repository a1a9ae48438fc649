"""Compares the cache store with its alternatives: puts and gets of KV-sized values.

Every store runs in its own process with the servers it needs, and all take turns within one run. A
get counts until every byte is in the caller's buffer and its checksum was compared; a put counts
from the computation of that checksum. Then the bytes are compared, outside the time. The values
together exceed the CPU's cache, and target buffers rotate. The page cache is warm, so files are
read from memory. Background work of a put is finished untimed before the next turn: puts are
measured in bursts of TOTAL_BYTES.

Caches are nearly always full, so puts are measured in full stores: ours evicts an older value, the
others overwrite one.

Peers that are not installed are reported as absent. Many need their own environment: ``--peers
PYTHON`` names its interpreter (lmcache, nixl-cu12, mooncake-transfer-engine-non-cuda, redis,
pymemcache).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KIB, MIB = 1 << 10, 1 << 20
SIZES = (8 * MIB, MIB, 64 * KIB)
"""The largest come first, because they fill the stores soonest."""

TOTAL_BYTES = 48 * MIB
"""Total size of the values of one size, more than a CPU's cache."""

FILL_ROUNDS = 4
"""Untimed rounds of puts that fill the stores, which hold at most four times TOTAL_BYTES."""

GETS_PER_PUT = 5
"""Rounds of gets per round of puts, except for the smallest size. A round takes milliseconds, so
many are needed to outweigh one interruption."""

_NUMBERS_PER_SIZE = 1 << 16


@dataclass(frozen=True, slots=True)
class Entrant:
    """A compared store. ``kind`` is ours, floor, shm (shared memory or files) or net.

    ``spins``: its processes poll without end and are stopped during other turns.
    """

    name: str
    kind: str
    module: str
    cls: str
    spins: bool = False


ENTRANTS = (
    Entrant("shared", "ours", "ours", "RagCache"),
    Entrant("socket", "ours", "ours", "RagCacheSocket"),
    Entrant("grpc-lane", "ours", "ours", "RagCacheGrpc"),
    Entrant("durable", "ours", "ours", "RagCacheDurable"),
    Entrant("disk", "ours", "ours", "RagCacheDisk"),
    Entrant("memcpy", "floor", "floors", "Memcpy"),
    Entrant("file per value", "floor", "floors", "Files"),
    Entrant("gRPC bytes", "net", "floors", "GrpcBytes"),
    Entrant("rocksdict", "shm", "rocks", "RocksDict"),
    Entrant("LMCache multi-process", "shm", "lmcache_stores", "MultiProcess"),
    Entrant("LMCache fs_native", "shm", "lmcache_stores", "FsNative"),
    Entrant("NIXL", "shm", "transfer_libraries", "Nixl", spins=True),
    Entrant("lmcache_server", "net", "lmcache_stores", "LMCacheServer"),
    Entrant("Mooncake TCP", "net", "transfer_libraries", "Mooncake"),
    Entrant("Redis", "net", "networked", "Redis"),
    Entrant("memcached", "net", "networked", "Memcached"),
)


@dataclass(slots=True)
class Runner:
    """A contestant's process."""

    entrant: Entrant
    process: subprocess.Popen[str]
    rates: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def ask(self, **words: Any) -> dict[str, Any]:
        """Send a command and return the answer. Raises RuntimeError if the process has ended."""
        self.run(True)
        self.tell(**words)
        answer = self.hear()
        self.run(False)
        return answer

    def run(self, on: bool) -> None:
        """Resume or stop its processes if they poll without end."""
        if self.entrant.spins:
            os.killpg(self.process.pid, signal.SIGCONT if on else signal.SIGSTOP)

    def tell(self, **words: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.entrant.name} has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, do: str, num_bytes: int, *, count: bool) -> None:
        """Put or get everything; record GB/s if the round counts."""
        for seconds, number in self.ask(do=do)["passes"]:
            if count and number:
                self.rates[do, num_bytes].append(number * num_bytes / seconds / 1e9)

    def median(self, do: str, num_bytes: int) -> float | None:
        """Return the median GB/s, or None without measurements."""
        rates = self.rates[do, num_bytes]
        return statistics.median(rates) if rates else None


@contextmanager
def running(entrants: Sequence[Entrant], peers: Path, folder: Path) -> Iterator[list[Runner]]:
    """Start all stores at once; report and leave out the absent ones."""
    with ExitStack() as stack:
        runners = []
        for entrant in entrants:
            own = folder / entrant.cls
            own.mkdir()
            python = Path(sys.executable) if entrant.kind in {"ours", "floor"} else peers
            argv = [str(python), "-m", "bench.contestants.worker", entrant.module, entrant.cls]
            process = subprocess.Popen(
                [*argv, str(own)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if os.environ.get("BENCH_LOUD") else subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "LMCACHE_LOG_LEVEL": "ERROR"},
            )
            runners.append(Runner(entrant, process))
            stack.callback(_end, runners[-1])
        present = [runner for runner in runners if _present(runner)]
        for runner in present:
            runner.run(False)
        yield present


def _present(runner: Runner) -> bool:
    try:
        reason = runner.hear().get("absent")
    except RuntimeError as error:
        reason = f"{error}"
    if reason:
        print(f"absent: {runner.entrant.name}: {reason}")
    return reason is None


def _end(runner: Runner) -> None:
    process = runner.process
    assert process.stdin is not None
    with suppress(ProcessLookupError):
        runner.run(True)
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with suppress(ProcessLookupError):  # also its remaining processes
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def compete(runners: list[Runner], num_bytes: int, rounds: int) -> None:
    """Fill every store, then measure puts and gets in turns."""
    order = random.Random(num_bytes)
    first = SIZES.index(num_bytes) * _NUMBERS_PER_SIZE
    for runner in runners:
        runner.ask(do="begin", num_bytes=num_bytes, first=first, count=TOTAL_BYTES // num_bytes)
    filled = FILL_ROUNDS if num_bytes == SIZES[0] else 1
    gets = rounds * GETS_PER_PUT if num_bytes > SIZES[-1] else rounds
    for do, fill, timed in (("put", filled, rounds), ("get", 0, gets)):
        for index in range(fill + timed):
            for runner in order.sample(runners, len(runners)):
                runner.measure(do, num_bytes, count=index >= fill)
                if do == "put":
                    runner.ask(do="settle")
                    os.sync()


def report(runners: Sequence[Runner]) -> None:
    """Print GB/s of every store."""
    heads = [f"{do} {_name(size)}" for size in SIZES for do in ("put", "get")]
    print(f"{'GB/s (median)':24}" + "".join(f"{head:>13}" for head in heads))
    for runner in runners:
        rates = [runner.median(do, size) for size in SIZES for do in ("put", "get")]
        cells = "".join(f"{'-' if rate is None else f'{rate:.2f}':>13}" for rate in rates)
        print(f"{runner.entrant.name:24}{cells}")


def ratios(runners: Sequence[Runner]) -> dict[str, Any]:
    """Return the ratios; None if one side is absent."""
    by_name = {runner.entrant.name: runner for runner in runners}

    def rate(name: str, do: str, size: int) -> float | None:
        return by_name[name].median(do, size) if name in by_name else None

    def best(kind: str, do: str, size: int) -> float | None:
        peers = [runner for runner in runners if runner.entrant.kind == kind]
        return max((r for peer in peers if (r := peer.median(do, size))), default=None)

    def over(ours: float | None, theirs: float | None) -> float | None:
        return None if ours is None or not theirs else round(ours / theirs, 3)

    eight = 8 * MIB
    net_get_8mib = best("net", "get", eight)
    net_put_8mib = best("net", "put", eight)
    rocks_put, rocks_get = rate("rocksdict", "put", eight), rate("rocksdict", "get", eight)
    shared_8mib, shared_1mib = rate("shared", "get", eight), rate("shared", "get", MIB)
    return {
        "shm_get_8mib_over_memcpy": over(shared_8mib, rate("memcpy", "get", eight)),
        "shm_get_1mib_over_best_shm_peer": over(shared_1mib, best("shm", "get", MIB)),
        "shm_get_8mib_over_best_shm_peer": over(shared_8mib, best("shm", "get", eight)),
        "socket_get_1mib_over_best_net_peer": over(
            rate("socket", "get", MIB), best("net", "get", MIB)
        ),
        "socket_get_8mib_over_best_net_peer": over(rate("socket", "get", eight), net_get_8mib),
        "put_accepted_8mib_over_best_net_peer": over(rate("socket", "put", eight), net_put_8mib),
        "put_durable_8mib_over_rocksdict": over(rate("durable", "put", eight), rocks_put),
        "disk_get_8mib_over_rocksdict": over(rate("disk", "get", eight), rocks_get),
        "peers": [r.entrant.name for r in runners if r.entrant.kind in {"shm", "net"}],
    }


def _name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def main(arguments: Sequence[str] | None = None) -> Mapping[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--peers", type=Path, default=Path(sys.executable), help="Python that has the peers"
    )
    parser.add_argument("--only", nargs="*", help="names of the stores that take part")
    given = parser.parse_args(arguments)
    left_out = {"grpc-lane", "file per value"} if given.quick else set()  # they are in no figure
    entrants = [e for e in ENTRANTS if e.name in (given.only or {e.name} - left_out)]
    rounds = 1 if given.quick else 8
    folder = Path(tempfile.mkdtemp(prefix="bench-store-"))
    try:
        with running(entrants, given.peers, folder) as runners:
            for size in SIZES:
                compete(runners, size, rounds)
            report(runners)
            found = {**ratios(runners), "page_cache": "warm", "quick": given.quick}
    finally:
        shutil.rmtree(folder)
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
