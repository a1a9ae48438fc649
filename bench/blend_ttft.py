"""Measures time to first token when a prompt is composed of chunks from other prompts.

The model has random weights and is large enough for prefill to dominate. Chunks are captured in
their own prompts. Then each is requested at another position, after other chunks, and a share of
its tokens is recomputed. Rounds are interleaved after a warm-up; figures are medians.

- ``full``: plain vLLM without our connector and without its prefix cache.
- ``prefix_cache``: vLLM's own prefix cache, a full hit.
- ``exact``: a prompt as it was captured, loaded from the store.
- ``blend0``, ``blend15``, ``blend30``: with this percentage of tokens recomputed.

The store has everything in memory. All other engines sleep while one is measured.

``_own_tier``: an engine with a host tier (RAGCACHE_HOST_TIER_BYTES) that has everything. It still
asks the store what it may load. Its metrics must show that no value came from the store.

``_disk``: the store was restarted, so its memory tier is empty and values come from its file. Only
the template is requested twice. Before each request the file is removed from the page cache.
``page_cache_share`` is the largest share that remained (mincore), and ``page_cache_share_before``
the share before the first removal. If ``from_page_cache`` is true, the file was not read from the
device. ``values_from_disk`` and ``values_from_memory`` are the store's own counts by case,
observations included. The host of a virtual disk may cache it, which cannot be seen here.

``where`` splits the time by the engine's record: queue (lookup, scheduling), load (fetch, rotate,
write), ``repair`` (the question's attention pass and recomputation) and prefill (the question). The
rest is the API server's.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.support.host_tier import resident_share
from bench.support.program import is_quick, median_ms, print_figures, say
from bench.support.tiny_engines import (
    CHUNK_TOKENS,
    HEAD_TOKENS,
    QUESTION_TOKENS,
    STORED_S,
    TinyModel,
    ask_vllm_prefix_cache,
    start_all,
    wait_until_stored,
)
from harness.completion import complete, record_of
from harness.processes import (
    COMPUTES_PLAIN,
    CacheStore,
    Engine,
    launch_engine,
    let_engines_sleep,
    start_cachestore,
)
from ragcache_core.plan.prompt import Prompt, assemble
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import engine_pb2

CAPTURED = {1: 8, 4: 4}
"""Number of prompts to capture in, by repeats of CHUNK_TOKENS in one. A blended prompt has
chunks of all of them."""

ROUNDS = {1: 20, 4: 5}
BUDGETS = {"blend0": 0.0, "blend15": 0.15, "blend30": 0.30}
ANSWER_TOKENS = 4
STORE_BYTES = 2 << 30
OWN_TIER_BYTES = 1 << 30
"""More than all captured values, so that none is evicted."""

OWN_TIER = "_own_tier"
DISK = "_disk"
CACHED_SHARE = 0.01
"""Share of a file in the page cache that counts as none."""


class Scene:
    """Prompts of one length, of ``repeat`` times CHUNK_TOKENS.

    ``chunks`` is [captured prompt][position].
    """

    def __init__(self, model: TinyModel, repeat: int) -> None:
        self._model = model
        self._head, self._question = model.ids(HEAD_TOKENS), model.ids(QUESTION_TOKENS)
        self.chunks = [model.chunks(CHUNK_TOKENS * repeat) for _ in range(CAPTURED[repeat])]

    def captured(self, number: int) -> Prompt:
        """Return one of the prompts that chunks are captured in."""
        return assemble(self._head, self.chunks[number % len(self.chunks)], self._question)

    def blended(self, number: int, *, later: bool) -> Prompt:
        """Return a prompt of chunks from all of them, each at another position.

        Args:
            later: Take the later half of them. No chunk then repeats in the first prompts.
        """
        captured = self.chunks[len(self.chunks) // 2 :] if later else self.chunks
        indices = range(len(self.chunks[0]))
        chunks = [captured[(index + number) % len(captured)][index] for index in indices]
        self._model.rng.shuffle(chunks)
        return assemble(self._head, chunks, self._question)


@dataclass(slots=True)
class Bench:
    """Engines and measurements: seconds and our engine's records, by case.

    ``around`` is a context for each request with reuse, by its case.
    """

    model: TinyModel
    plain: Engine
    ours: Engine
    around: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
    times_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    records: defaultdict[str, list[engine_pb2.RequestRecord]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _last: Engine | None = None

    def _turn_to(self, engine: Engine) -> None:
        """Wait until all other engines sleep."""
        if self._last is not engine:
            let_engines_sleep()
        self._last = engine

    def full(self, prompt: Prompt) -> None:
        self._turn_to(self.plain)
        answer = complete(self.plain.url, prompt.token_ids, max_tokens=ANSWER_TOKENS)
        self.times_s["full"].append(answer.ttft_s)

    def prefix_cache(self, prompt: Prompt) -> None:
        self._turn_to(self.ours)
        answer = ask_vllm_prefix_cache(self.ours, prompt, ANSWER_TOKENS)
        self.times_s["prefix_cache"].append(answer.ttft_s)

    def reuse(
        self, case: str, prompt: Prompt, budget: float | None, engine: Engine | None = None
    ) -> None:
        """Time one request. A budget of None means exact."""
        asked = engine or self.ours
        self._turn_to(asked)
        request = uuid.uuid4().hex
        with self.around(case):
            answer = complete(
                asked.url,
                prompt.token_ids,
                max_tokens=ANSWER_TOKENS,
                plan=self.model.plan(prompt, budget, request).encode(),
                cache_salt=request,  # bypasses the engine's own prefix cache
            )
            record = record_of(asked, request)
        self.times_s[case].append(answer.ttft_s)
        self.records[case].append(record)

    def figures(self) -> dict[str, dict[str, object]]:
        """Return medians in ms, their parts, and the recomputed tokens."""
        loaded = {
            case: statistics.median(r.loaded_tokens / r.prompt_tokens for r in records)
            for case, records in self.records.items()
        }
        if min(loaded.values()) < 0.9:
            raise RuntimeError(f"less was reused than there is: {loaded}")
        return {
            "ms": {case: median_ms(times) for case, times in self.times_s.items()},
            "least_ms": {case: median_ms([min(times)]) for case, times in self.times_s.items()},
            "where_ms": {
                case: {
                    "queue": median_ms(r.queue_s for r in records),
                    "load": median_ms(r.load_s - r.recompute_s for r in records),
                    "repair": median_ms(r.recompute_s for r in records),
                    "prefill": median_ms(r.prefill_s for r in records),
                }
                for case, records in self.records.items()
            },
            "recomputed": {
                case: round(
                    statistics.median(
                        r.recomputed_tokens / max(1, r.blended_tokens) for r in records
                    ),
                    4,
                )
                for case, records in self.records.items()
                if case.startswith("blend")
            },
        }

    def ratio(self, case: str) -> float:
        full_ms, case_ms = median_ms(self.times_s["full"]), median_ms(self.times_s[case])
        return round(full_ms / case_ms, 2)


class OwnTier:
    """An engine that loads everything from its own host tier."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._from_store = 0.0

    def fill(self, bench: Bench, scene: Scene) -> None:
        """Load all chunks until none of them comes from the store."""
        deadline = time.monotonic() + STORED_S
        while True:
            before = self._values_from("store")
            for number in range(len(scene.chunks)):
                bench.reuse("fill", scene.captured(number), None, self.engine)
                time.sleep(0.2)  # copied in after the answer
            self._from_store = self._values_from("store")
            if self._from_store == before:
                return
            if time.monotonic() > deadline:
                raise RuntimeError("an engine's own tier does not keep what it has loaded")

    def check(self) -> None:
        """Raise RuntimeError if a value came from the store since ``fill``."""
        if self._values_from("store") != self._from_store or not self._values_from("host"):
            raise RuntimeError("what was to come from the engine's own tier came from the store")

    def _values_from(self, tier: str) -> float:
        lines = httpx.get(f"{self.engine.url}/metrics", timeout=5).text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("ragcache_engine_loaded_values_total") and f'tier="{tier}"' in line
        )


class ValuesFile:
    """The store's file of values, and its share in the page cache.

    ``_share_before`` is the initial share, ``_share`` the largest one after a removal.
    ``_from_disk`` and ``_from_memory`` count the values that the store served, by case,
    observations included.
    """

    def __init__(self, path: Path, address: str) -> None:
        self._path = path
        self._client = StoreClient(address)
        self._share_before: float | None = None
        self._share = 0.0
        self._from_disk: Counter[str] = Counter()
        self._from_memory: Counter[str] = Counter()

    @contextlib.contextmanager
    def reading(self, case: str) -> Iterator[None]:
        """Wrap a request that reads the file."""
        self._drop()
        before = self._client.stats()
        yield
        after = self._client.stats()
        self._from_disk[case] += after.hits_disk - before.hits_disk
        self._from_memory[case] += after.hits_memory - before.hits_memory

    def close(self) -> dict[str, object]:
        """Close the connection to the store, and return the figures."""
        self._client.close()
        return {
            "page_cache_share_before": round(self._share_before or 0.0, 4),
            "page_cache_share": round(self._share, 4),
            "from_page_cache": self._share > CACHED_SHARE,
            "values_from_disk": dict(self._from_disk),
            "values_from_memory": dict(self._from_memory),
        }

    def _drop(self) -> None:
        """Remove it from the page cache, and note the share that remained."""
        with self._path.open("rb") as file:
            if self._share_before is None:
                self._share_before = resident_share(file.fileno())
            os.fsync(file.fileno())  # dirty pages cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self._share = max(self._share, resident_share(file.fileno()))


def measure(
    bench: Bench, scene: Scene, rounds: int, suffix: str = "", own: OwnTier | None = None
) -> None:
    """Measure rounds of each case in turn. ``own`` adds exact and blend15 from the host tier."""
    for number in range(rounds):
        # A value that was read from disk is promoted soon, so no chunk is requested twice.
        blended = scene.blended(number, later=suffix == DISK)
        bench.full(blended)
        if not suffix:
            bench.prefix_cache(blended)
        bench.reuse(f"exact{suffix}", scene.captured(number), None)
        for case, budget in BUDGETS.items():
            if not suffix or case == "blend15":
                bench.reuse(f"{case}{suffix}", blended, budget)
        if own is not None:
            bench.reuse(f"exact{OWN_TIER}", scene.captured(number), None, own.engine)
            bench.reuse(f"blend15{OWN_TIER}", blended, BUDGETS["blend15"], own.engine)
            own.check()
        say(f"round {number + 1}{suffix} of {rounds}")


@dataclass(slots=True)
class Stage:
    """All processes, in a folder. ``store`` changes with a restart."""

    folder: Path
    model: TinyModel
    store: CacheStore
    plain: Engine
    ours: Engine
    own: OwnTier

    def measure_length(self, repeat: int, rounds: int) -> dict[str, object]:
        """Measure all cases with prompts of one length."""
        scene = Scene(self.model, repeat)
        bench = Bench(self.model, self.plain, self.ours)
        self._capture(scene)
        self.own.fill(bench, scene)
        measure(bench, scene, 2, own=self.own)  # warms up
        bench.times_s.clear()
        bench.records.clear()
        measure(bench, scene, rounds, own=self.own)
        self._restart_store()
        values = ValuesFile(self.folder / "store" / "data" / "values", self.store.address)
        disk = Bench(self.model, self.plain, self.ours, values.reading)
        measure(disk, scene, min(len(scene.chunks) // 2, rounds), DISK)
        return {
            **bench.figures(),
            "ttft_full_over_blend15": bench.ratio("blend15"),
            "ttft_full_over_exact": bench.ratio("exact"),
            "ttft_full_over_blend15_own_tier": bench.ratio(f"blend15{OWN_TIER}"),
            "ttft_full_over_exact_own_tier": bench.ratio(f"exact{OWN_TIER}"),
            "ttft_full_over_blend15_disk": disk.ratio(f"blend15{DISK}"),
            "ttft_full_over_exact_disk": disk.ratio(f"exact{DISK}"),
            "disk": disk.figures() | values.close(),
            "prompt_tokens": len(scene.captured(0).token_ids),
        }

    def _capture(self, scene: Scene) -> None:
        """Compute, store and observe every chunk."""
        for number in range(len(scene.chunks)):
            prompt = scene.captured(number)
            plan = self.model.plan(prompt, 0.0).encode()
            complete(self.ours.url, prompt.token_ids, max_tokens=1, plan=plan)
            chunks = self.model.variants(prompt, 0.0)[1:]
            wait_until_stored(self.store.address, chunks, observed=True)

    def _restart_store(self) -> None:
        """Restart the store, so that values are on disk only."""
        port = int(self.store.address.rsplit(":", 1)[1])
        self.store.service.stop()
        folder = self.folder / "store"
        self.store = start_cachestore(folder, memory_bytes=STORE_BYTES, port=port)
        time.sleep(3)  # until the engines are connected again


def run(rounds: int | None, repeats: Sequence[int], folder: Path) -> dict[str, object]:
    """Measure and return the figures of the JSON line, the shortest prompt first.

    ``rounds`` replaces ROUNDS.
    """
    model = TinyModel(folder / "model", max_length=16384)
    result: dict[str, object] = {"rounds": rounds or ROUNDS[repeats[0]]}
    length = 1024 + 2048 * max(repeats)
    with contextlib.ExitStack() as stack:
        store = start_cachestore(folder / "store", memory_bytes=STORE_BYTES)
        tier = {"RAGCACHE_HOST_TIER_BYTES": str(OWN_TIER_BYTES)}
        plain, ours, tiered = (
            launch_engine(folder, model.folder, address, *words, max_length=length, settings=env)
            for address, words, env in (
                (None, ["--no-enable-prefix-caching"], {}),
                (store.address, [], COMPUTES_PLAIN),
                (store.address, [], COMPUTES_PLAIN | tier),
            )
        )
        stage = Stage(folder, model, store, plain, ours, OwnTier(tiered))
        stack.callback(lambda: stage.store.service.stop())  # noqa: PLW0108  it is another by then
        start_all(stack, (plain, ours, tiered))
        for repeat in repeats:
            found = stage.measure_length(repeat, rounds or ROUNDS[repeat])
            result |= found if repeat == repeats[0] else {f"{repeat * 2}k": found}
    return result


def main() -> None:
    quick = is_quick(__doc__, "3 rounds of 2k tokens only")
    rounds, repeats = (3, (1,)) if quick else (None, (1, 4))
    print_figures(lambda folder: run(rounds, repeats, folder))


if __name__ == "__main__":
    main()
