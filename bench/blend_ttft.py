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

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.support.completion import complete, record_of
from bench.support.host_tier import resident_share
from bench.support.processes import (
    COMPUTES_PLAIN,
    CacheStore,
    Engine,
    launch_engine,
    let_engines_sleep,
    start_cachestore,
    wait_for_engine,
)
from ragcache_core.blend.observation import observation_key
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.plan.prompt import Prompt, assemble, plan_blend, plan_exact
from ragcache_core.plan.segments import checked_segments
from ragcache_core.store_api import LookupKey
from ragcache_kv.model_folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import engine_pb2
from tests.kit.model import make_tiny_model

DOMAIN = "public"
HEAD_TOKENS = 48
QUESTION_TOKENS = 32
CHUNK_TOKENS = (256, 251, 240, 256, 197, 256, 249, 167)
CAPTURED = {1: 8, 4: 4}
"""Number of prompts to capture in, by repeats of CHUNK_TOKENS in one. A blended prompt has
chunks of all of them."""

ROUNDS = {1: 20, 4: 5}
BUDGETS = {"blend0": 0.0, "blend15": 0.15, "blend30": 0.30}
ANSWER_TOKENS = 4
STORED_S = 300.0
OWN_TIER_BYTES = 1 << 30
"""More than all captured values, so that none is evicted."""

OWN_TIER = "_own_tier"
DISK = "_disk"
CACHED_SHARE = 0.01
"""Share of a file in the page cache that counts as none."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Prompts of one length. ``chunks`` is [captured prompt][position]."""

    head: list[int]
    chunks: list[list[list[int]]]
    question: list[int]

    @classmethod
    def make(cls, rng: random.Random, vocabulary: int, repeat: int) -> Scene:
        """Make a scene; ``repeat`` is the number of CHUNK_TOKENS in a prompt."""

        def ids(count: int) -> list[int]:
            return [rng.randrange(vocabulary) for _ in range(count)]

        chunks = [[ids(n) for n in CHUNK_TOKENS * repeat] for _ in range(CAPTURED[repeat])]
        return cls(ids(HEAD_TOKENS), chunks, ids(QUESTION_TOKENS))

    def captured(self, number: int) -> Prompt:
        """Return one of the prompts that chunks are captured in."""
        return assemble(self.head, self.chunks[number % len(self.chunks)], self.question)

    def blended(self, number: int, rng: random.Random) -> Prompt:
        """Return a prompt of chunks from all of them, each at another position."""
        return self._mixed(self.chunks, number, rng)

    def blended_of_later(self, number: int, rng: random.Random) -> Prompt:
        """Return the same from their later half, without repeating a chunk in the first prompts."""
        return self._mixed(self.chunks[len(self.chunks) // 2 :], number, rng)

    def _mixed(self, captured: list[list[list[int]]], number: int, rng: random.Random) -> Prompt:
        indices = range(len(self.chunks[0]))
        chunks = [captured[(index + number) % len(captured)][index] for index in indices]
        rng.shuffle(chunks)
        return assemble(self.head, chunks, self.question)


@dataclass(slots=True)
class Bench:
    """Engines and measurements: seconds and our engine's records, by case.

    ``around`` is a context for each request with reuse, by its case.
    """

    plain: Engine
    ours: Engine
    space: KVSpace
    times_s: defaultdict[str, list[float]]
    records: defaultdict[str, list[engine_pb2.RequestRecord]]
    around: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
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
        salt = uuid.uuid4().hex
        for _ in range(2):
            answer = complete(
                self.ours.url, prompt.token_ids, max_tokens=ANSWER_TOKENS, cache_salt=salt
            )
        self.times_s["prefix_cache"].append(answer.ttft_s)

    def reuse(
        self, case: str, prompt: Prompt, budget: float | None, engine: Engine | None = None
    ) -> None:
        """Time one request. A budget of None means exact."""
        asked = engine or self.ours
        self._turn_to(asked)
        request = uuid.uuid4().hex
        if budget is None:
            plan = plan_exact(prompt, self.space, DOMAIN, request)
        else:
            plan = plan_blend(prompt, self.space, DOMAIN, request, budget)
        with self.around(case):
            answer = complete(
                asked.url,
                prompt.token_ids,
                max_tokens=ANSWER_TOKENS,
                plan=plan.encode(),
                cache_salt=request,  # bypasses the engine's own prefix cache
            )
            record = record_of(asked, request)
        self.times_s[case].append(answer.ttft_s)
        self.records[case].append(record)


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

    ``share_before`` is the initial share, ``share`` the largest one after a removal. ``from_disk``
    and ``from_memory`` count the values that the store served, by case, observations included.
    """

    def __init__(self, path: Path, address: str) -> None:
        self._path = path
        self._client = StoreClient(address)
        self.share_before: float | None = None
        self.share = 0.0
        self.from_disk: Counter[str] = Counter()
        self.from_memory: Counter[str] = Counter()

    @contextlib.contextmanager
    def reading(self, case: str) -> Iterator[None]:
        """Wrap a request that reads the file."""
        self._drop()
        before = self._client.stats()
        yield
        after = self._client.stats()
        self.from_disk[case] += after.hits_disk - before.hits_disk
        self.from_memory[case] += after.hits_memory - before.hits_memory

    def figures(self) -> dict[str, object]:
        """Return the figures for the JSON line."""
        return {
            "page_cache_share_before": round(self.share_before or 0.0, 4),
            "page_cache_share": round(self.share, 4),
            "from_page_cache": self.share > CACHED_SHARE,
            "values_from_disk": dict(self.from_disk),
            "values_from_memory": dict(self.from_memory),
        }

    def close(self) -> None:
        """Close the connection to the store."""
        self._client.close()

    def _drop(self) -> None:
        """Remove it from the page cache, and note the share that remained."""
        with self._path.open("rb") as file:
            if self.share_before is None:
                self.share_before = resident_share(file.fileno())
            os.fsync(file.fileno())  # dirty pages cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self.share = max(self.share, resident_share(file.fileno()))


def capture(bench: Bench, store: CacheStore, scene: Scene) -> None:
    """Compute, store and observe every chunk."""
    for number in range(len(scene.chunks)):
        prompt = scene.captured(number)
        plan = plan_blend(prompt, bench.space, DOMAIN, uuid.uuid4().hex, 0.0)
        complete(bench.ours.url, prompt.token_ids, max_tokens=1, plan=plan.encode())
        _, *chunks = checked_segments(plan, prompt.token_ids, bench.space)
        wait_until_observed(store.address, [named.variant for named in chunks])


def wait_until_observed(store: str, variants: Sequence[VariantKey]) -> None:
    """Wait until saves and observations, which follow the answer, are done."""
    client = StoreClient(store)
    wants = [LookupKey.for_variant(key) for v in variants for key in (v, observation_key(v))]
    deadline = time.monotonic() + STORED_S
    while not all(found.stored for found in client.lookup(wants, timeout_s=5).variants):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine did not save and observe its chunks in {STORED_S} s")
        time.sleep(0.05)
    client.close()


def measure(
    bench: Bench,
    scene: Scene,
    rounds: int,
    rng: random.Random,
    suffix: str = "",
    own: OwnTier | None = None,
) -> None:
    """Measure rounds of each case in turn. ``own`` adds exact and blend15 from the host tier."""
    for number in range(rounds):
        # A value that was read from disk is promoted soon, so no chunk is requested twice.
        mix = scene.blended_of_later if suffix == DISK else scene.blended
        blended = mix(number, rng)
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
        last = {case: f"{times[-1] * 1e3:.0f}" for case, times in bench.times_s.items()}
        print(f"round {number + 1}{suffix}: {last} ms", file=sys.stderr)


def figures(bench: Bench) -> dict[str, object]:
    """Return medians in ms, their parts, and the recomputed tokens."""
    ms = {case: _median_ms(times) for case, times in bench.times_s.items()}
    where = {
        case: {
            "queue": _median_ms([r.queue_s for r in records]),
            "load": _median_ms([r.load_s - r.recompute_s for r in records]),
            "repair": _median_ms([r.recompute_s for r in records]),
            "prefill": _median_ms([r.prefill_s for r in records]),
        }
        for case, records in bench.records.items()
    }
    shares = {
        case: round(
            statistics.median(r.recomputed_tokens / max(1, r.blended_tokens) for r in records), 4
        )
        for case, records in bench.records.items()
        if case.startswith("blend")
    }
    loaded = {
        case: statistics.median(r.loaded_tokens / r.prompt_tokens for r in records)
        for case, records in bench.records.items()
    }
    if min(loaded.values()) < 0.9:
        raise RuntimeError(f"less was reused than there is: {loaded}")
    least = {case: round(min(times) * 1e3, 1) for case, times in bench.times_s.items()}
    return {"ms": ms, "least_ms": least, "where_ms": where, "recomputed": shares}


def _median_ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 1)


def _ratio(ms: Mapping[str, float], case: str) -> float:
    return round(ms["full"] / ms[case], 2)


@dataclass(slots=True)
class Stage:
    """All processes, in a folder. ``store`` changes with a restart."""

    folder: Path
    store: CacheStore
    plain: Engine
    ours: Engine
    own: OwnTier
    space: KVSpace

    def values(self) -> ValuesFile:
        """Return the store's file of values."""
        return ValuesFile(self.folder / "store" / "data" / "values", self.store.address)

    def bench(self) -> Bench:
        """Return a bench without measurements."""
        return Bench(self.plain, self.ours, self.space, defaultdict(list), defaultdict(list))

    def restart_store(self) -> None:
        """Restart the store, so that values are on disk only."""
        port = int(self.store.address.rsplit(":", 1)[1])
        self.store.service.stop()
        self.store = start_cachestore(self.folder / "store", memory_bytes=2 << 30, port=port)
        time.sleep(3)  # until the engines are connected again


def measure_length(
    stage: Stage, scene: Scene, rounds: int, rng: random.Random
) -> dict[str, object]:
    """Measure all cases with prompts of one length."""
    bench = stage.bench()
    capture(bench, stage.store, scene)
    stage.own.fill(bench, scene)
    measure(bench, scene, 2, rng, own=stage.own)  # warms up
    bench.times_s.clear()
    bench.records.clear()
    measure(bench, scene, rounds, rng, own=stage.own)
    found = figures(bench)
    stage.restart_store()
    disk, values = stage.bench(), stage.values()
    disk.around = values.reading
    unread = len(scene.chunks) // 2
    measure(disk, scene, min(unread, rounds), rng, DISK)
    on_disk = figures(disk) | values.figures()
    values.close()
    ms, disk_ms = found["ms"], on_disk["ms"]
    assert isinstance(ms, dict)
    assert isinstance(disk_ms, dict)
    return found | {
        "ttft_full_over_blend15": _ratio(ms, "blend15"),
        "ttft_full_over_exact": _ratio(ms, "exact"),
        "ttft_full_over_blend15_own_tier": _ratio(ms, f"blend15{OWN_TIER}"),
        "ttft_full_over_exact_own_tier": _ratio(ms, f"exact{OWN_TIER}"),
        "ttft_full_over_blend15_disk": _ratio(disk_ms, f"blend15{DISK}"),
        "ttft_full_over_exact_disk": _ratio(disk_ms, f"exact{DISK}"),
        "disk": on_disk,
        "prompt_tokens": len(scene.captured(0).token_ids),
    }


def run(rounds: int | None, repeats: Sequence[int], folder: Path) -> dict[str, object]:
    """Measure and return the figures of the JSON line, the shortest prompt first.

    ``rounds`` replaces ROUNDS.
    """
    model = make_tiny_model(
        folder / "model", layers=12, hidden=768, heads=12, kv_heads=4, max_length=16384
    )
    loaded = load_model_folder(str(model))
    vocabulary = int(loaded.config["vocab_size"]) - 8
    rng = random.Random(uuid.uuid4().int)
    result: dict[str, object] = {"rounds": rounds or ROUNDS[repeats[0]]}
    length = 1024 + 2048 * max(repeats)
    with contextlib.ExitStack() as stack:
        store = start_cachestore(folder / "store", memory_bytes=2 << 30)
        address = store.address
        tier = {"RAGCACHE_HOST_TIER_BYTES": str(OWN_TIER_BYTES)}
        engines = [
            launch_engine(folder, model, None, "--no-enable-prefix-caching", max_length=length),
            launch_engine(folder, model, address, max_length=length, settings=COMPUTES_PLAIN),
            launch_engine(
                folder, model, address, max_length=length, settings=COMPUTES_PLAIN | tier
            ),
        ]
        for engine in engines:
            stack.callback(engine.service.stop)
        plain, ours, tiered = engines
        stage = Stage(folder, store, plain, ours, OwnTier(tiered), loaded.space("auto"))
        stack.callback(lambda: stage.store.service.stop())  # noqa: PLW0108  it is another by then
        for engine in engines:
            wait_for_engine(engine)
        for repeat in repeats:
            scene = Scene.make(rng, vocabulary, repeat)
            print(f"capturing prompts of {repeat * 2}k tokens", file=sys.stderr)
            found = measure_length(stage, scene, rounds or ROUNDS[repeat], rng)
            result |= found if repeat == repeats[0] else {f"{repeat * 2}k": found}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 2k tokens only")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(3 if quick else None, (1,) if quick else (1, 4), Path(folder))))


if __name__ == "__main__":
    main()
