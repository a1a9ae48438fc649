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

import json
import os
import random
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.support.program import options, print_figures, say

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
    Entrant("shared, tagged", "ours", "ours", "RagCacheTagged"),
    Entrant("socket, tagged", "ours", "ours", "RagCacheTaggedSocket"),
    Entrant("durable", "ours", "ours", "RagCacheDurable"),
    Entrant("disk", "ours", "ours", "RagCacheDisk"),
    Entrant("disk, encrypted", "ours", "ours", "RagCacheDiskEncrypted"),
    Entrant("socket disk", "ours", "ours", "RagCacheDiskSocket"),
    Entrant("socket disk, encrypted", "ours", "ours", "RagCacheDiskSocketEncrypted"),
    Entrant("memcpy", "floor", "baselines", "Memcpy"),
    Entrant("gRPC bytes", "net", "baselines", "GrpcBytes"),
    Entrant("rocksdict", "shm", "baselines", "RocksDict"),
    Entrant("LMCache multi-process", "shm", "lmcache_stores", "MultiProcess"),
    Entrant("NIXL", "shm", "transfer_libraries", "Nixl", spins=True),
    Entrant("Mooncake TCP", "net", "transfer_libraries", "Mooncake"),
    Entrant("Redis", "net", "baselines", "Redis"),
    Entrant("memcached", "net", "baselines", "Memcached"),
)


@dataclass(slots=True)
class Runner:
    """A contestant's process."""

    entrant: Entrant
    process: subprocess.Popen[str]
    rates: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def ask(self, **words: Any) -> dict[str, Any]:
        """Send a command and return the answer. Raises RuntimeError if the process has ended."""
        assert self.process.stdin is not None
        self.run(True)
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        answer = self.hear()
        self.run(False)
        return answer

    def run(self, on: bool) -> None:
        """Resume or stop its processes if they poll without end."""
        if self.entrant.spins:
            os.killpg(self.process.pid, signal.SIGCONT if on else signal.SIGSTOP)

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
def running(peers: Path, folder: Path, only: str) -> Iterator[list[Runner]]:
    """Start stores at once; report and leave out the absent ones.

    Args:
        only: A part of the names of the stores.
    """
    with ExitStack() as stack:
        runners = []
        for entrant in (one for one in ENTRANTS if only in one.name):
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
        say(f"absent: {runner.entrant.name}: {reason}")
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


def ratios(runners: Sequence[Runner]) -> dict[str, Any]:
    """Return the ratios; None if one side is absent."""

    def best(names: str, do: str, size: int) -> float | None:
        """Return the highest median rate of a store, or of all stores of a kind."""
        found = [one for one in runners if names in (one.entrant.name, one.entrant.kind)]
        return max((rate for one in found if (rate := one.median(do, size))), default=None)

    def over(ours: str, theirs: str, do: str, size: int) -> float | None:
        above, below = best(ours, do, size), best(theirs, do, size)
        return None if above is None or not below else round(above / below, 3)

    eight = 8 * MIB
    return {
        "shm_get_8mib_over_memcpy": over("shared", "memcpy", "get", eight),
        "shm_tagged_get_8mib_over_untagged": over("shared, tagged", "shared", "get", eight),
        "socket_tagged_get_8mib_over_untagged": over("socket, tagged", "socket", "get", eight),
        "shm_tagged_put_8mib_over_untagged": over("shared, tagged", "shared", "put", eight),
        "socket_tagged_put_8mib_over_untagged": over("socket, tagged", "socket", "put", eight),
        "shm_get_1mib_over_best_shm_peer": over("shared", "shm", "get", MIB),
        "shm_get_8mib_over_best_shm_peer": over("shared", "shm", "get", eight),
        "socket_get_1mib_over_best_net_peer": over("socket", "net", "get", MIB),
        "socket_get_8mib_over_best_net_peer": over("socket", "net", "get", eight),
        "put_accepted_8mib_over_best_net_peer": over("socket", "net", "put", eight),
        "put_durable_8mib_over_rocksdict": over("durable", "rocksdict", "put", eight),
        "disk_get_8mib_over_rocksdict": over("disk", "rocksdict", "get", eight),
        "atrest_put_ratio": over("socket disk, encrypted", "socket disk", "put", eight),
        "atrest_get_ratio": over("socket disk, encrypted", "socket disk", "get", eight),
        "atrest_shared_put_ratio": over("disk, encrypted", "disk", "put", eight),
        "atrest_shared_get_ratio": over("disk, encrypted", "disk", "get", eight),
        "peers": [r.entrant.name for r in runners if r.entrant.kind in {"shm", "net"}],
    }


def run(peers: Path, quick: bool, folder: Path, only: str = "") -> dict[str, Any]:
    with running(peers, folder, only) as runners:
        for size in SIZES:
            compete(runners, size, rounds=1 if quick else 8)
        return {**ratios(runners), "page_cache": "warm", "quick": quick}


def main() -> None:
    parser = options(__doc__, "fewer rounds")
    parser.add_argument(
        "--peers", type=Path, default=Path(sys.executable), help="Python that has the peers"
    )
    parser.add_argument("--only", default="", help="A part of the names of the stores to run")
    given = parser.parse_args()
    print_figures(lambda folder: run(given.peers, given.quick, folder, given.only))


if __name__ == "__main__":
    main()
