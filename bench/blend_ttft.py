"""Time to first token when a prompt is put together from chunks of other prompts.

A model with random weights that is large enough for prefill to be what takes the time. Chunks are
captured in prompts of their own; then each is asked for at another place, behind chunks that it has
never seen, and a share of its tokens is recomputed. Interleaved, warmed up, medians:

full: plain vLLM, without our connector and its own prefix cache. prefix_cache: vLLM's own, hit in
full. exact: a prompt as it was captured, all of it out of the store. blend0, blend15, blend30: so
many percent recomputed. The store has all of it in memory. Before an engine is asked, all others
sleep.

``_own_tier``: of an engine with a host tier (RAGCACHE_HOST_TIER_BYTES), which holds all of it; it
still asks the store what it may load. Its own metrics have to say that no value came from there.

``_disk``: the store was restarted and has nothing in memory, so that all is read from its file of
values; no chunk is asked for twice, only the template is. Before each request that file is taken
out of the operating system's page cache; what share was in there all the same (mincore), at most,
is printed as ``page_cache_share``; before the first time it was ``page_cache_share_before``.
Where the former is not next to 0 (``from_page_cache``), ``_disk`` only means: from a file.
``values_from_disk`` and ``values_from_memory`` are the store's own counts, by case, with what it
keeps of observations. What a virtual disk's host keeps in memory of its own nobody here can see, so
the store's disk may still be faster than its kind is.

``where`` says where a request's time goes, by the engine's own record, the rest being its server's:
queue (the store's lookup, scheduling), load (fetching, turning and writing KV), repair (the
question's look and the recomputed tokens), prefill (the question).
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
from tests.helpers.tiny_model import make_tiny_model

DOMAIN = "public"
HEAD_TOKENS = 48
QUESTION_TOKENS = 32
CHUNK_TOKENS = (256, 251, 240, 256, 197, 256, 249, 167)
CAPTURED = {1: 8, 4: 4}
"""Prompts that chunks are captured in, by how often CHUNK_TOKENS are in one. One that is blended
has chunks of all of them."""

ROUNDS = {1: 20, 4: 5}
BUDGETS = {"blend0": 0.0, "blend15": 0.15, "blend30": 0.30}
ANSWER_TOKENS = 4
STORED_S = 300.0
OWN_TIER_BYTES = 1 << 30
"""More than all that is captured, so that nothing has to leave."""

OWN_TIER = "_own_tier"
DISK = "_disk"
CACHED_SHARE = 0.01
"""Of a file, which counts as none of it."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Prompts of one length. chunks: [captured prompt][place]."""

    head: list[int]
    chunks: list[list[list[int]]]
    question: list[int]

    @classmethod
    def make(cls, rng: random.Random, vocabulary: int, repeat: int) -> Scene:
        """repeat: how often CHUNK_TOKENS are in a prompt."""

        def ids(count: int) -> list[int]:
            return [rng.randrange(vocabulary) for _ in range(count)]

        chunks = [[ids(n) for n in CHUNK_TOKENS * repeat] for _ in range(CAPTURED[repeat])]
        return cls(ids(HEAD_TOKENS), chunks, ids(QUESTION_TOKENS))

    def captured(self, number: int) -> Prompt:
        """One of the prompts that chunks are captured in."""
        return assemble(self.head, self.chunks[number % len(self.chunks)], self.question)

    def blended(self, number: int, rng: random.Random) -> Prompt:
        """A prompt of chunks from all of them, each at another place."""
        return self._mixed(self.chunks, number, rng)

    def blended_of_later(self, number: int, rng: random.Random) -> Prompt:
        """The same of the later half of them, no chunk in two prompts of a number below that."""
        return self._mixed(self.chunks[len(self.chunks) // 2 :], number, rng)

    def _mixed(self, captured: list[list[list[int]]], number: int, rng: random.Random) -> Prompt:
        places = range(len(self.chunks[0]))
        chunks = [captured[(place + number) % len(captured)][place] for place in places]
        rng.shuffle(chunks)
        return assemble(self.head, chunks, self.question)


@dataclass(slots=True)
class Bench:
    """Engines and what was measured. times_s: by case. records: of ours, by case.

    around: a context for each request that reuses, by its case. _last: the engine asked last.
    """

    plain: Engine
    ours: Engine
    space: KVSpace
    times_s: defaultdict[str, list[float]]
    records: defaultdict[str, list[engine_pb2.RequestRecord]]
    around: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
    _last: Engine | None = None

    def _turn_to(self, engine: Engine) -> None:
        """All other engines sleep."""
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
        """budget None: exact. engine: not ours."""
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
                plan=plan.to_json(),
                cache_salt=request,  # hides what the engine has itself
            )
            record = record_of(asked, request)
        self.times_s[case].append(answer.ttft_s)
        self.records[case].append(record)


class OwnTier:
    """An engine with a host tier of its own, which everything is loaded from."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._from_store = 0.0

    def fill(self, bench: Bench, scene: Scene) -> None:
        """Have all chunks loaded, until none of them comes from the store any more."""
        deadline = time.monotonic() + STORED_S
        while True:
            before = self._values_from("store")
            for number in range(len(scene.chunks)):
                bench.reuse("fill", scene.captured(number), None, self.engine)
                time.sleep(0.2)  # copied in behind the answer
            self._from_store = self._values_from("store")
            if self._from_store == before:
                return
            if time.monotonic() > deadline:
                raise RuntimeError("an engine's own tier does not keep what it has loaded")

    def check(self) -> None:
        """Raises RuntimeError if any value has come from the store since ``fill``."""
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
    """The store's file of values, and how much of it the page cache holds when it is read.

    share_before: at first. share: the most that was in there right after it was to be emptied.
    from_disk, from_memory: values that the store says it gave, by case, observations included.
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
        """Around a request that is to read it."""
        self._drop()
        before = self._client.stats()
        yield
        after = self._client.stats()
        self.from_disk[case] += after.hits_disk - before.hits_disk
        self.from_memory[case] += after.hits_memory - before.hits_memory

    def figures(self) -> dict[str, object]:
        """For the JSON line."""
        return {
            "page_cache_share_before": round(self.share_before or 0.0, 4),
            "page_cache_share": round(self.share, 4),
            "from_page_cache": self.share > CACHED_SHARE,
            "values_from_disk": dict(self.from_disk),
            "values_from_memory": dict(self.from_memory),
        }

    def close(self) -> None:
        """Ask the store no more."""
        self._client.close()

    def _drop(self) -> None:
        """Take it out of the page cache, and note how much stayed."""
        with self._path.open("rb") as file:
            if self.share_before is None:
                self.share_before = resident_share(file.fileno())
            os.fsync(file.fileno())  # what is not written yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self.share = max(self.share, resident_share(file.fileno()))


def capture(bench: Bench, store: CacheStore, scene: Scene) -> None:
    """Have every chunk computed, stored and observed."""
    for number in range(len(scene.chunks)):
        prompt = scene.captured(number)
        plan = plan_blend(prompt, bench.space, DOMAIN, uuid.uuid4().hex, 0.0)
        complete(bench.ours.url, prompt.token_ids, max_tokens=1, plan=plan.to_json())
        _, *chunks = checked_segments(plan, prompt.token_ids, bench.space)
        wait_until_observed(store.address, [named.variant for named in chunks])


def wait_until_observed(store: str, variants: Sequence[VariantKey]) -> None:
    """Saving and observing happen behind the answer; wait until both are done."""
    client = StoreClient(store)
    wants = [LookupKey.of(key) for v in variants for key in (v, observation_key(v))]
    deadline = time.monotonic() + STORED_S
    while not all(found.held for found in client.lookup(wants, timeout_s=5).variants):
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
    """rounds of each case, one after the other. own: beside the others, exact and blend15."""
    for number in range(rounds):
        # What has been read from disk once is soon in memory: no chunk is asked for twice.
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
    """Medians in ms, where they went, and what was recomputed."""
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
    """Everything that runs, in a folder. store: another one when it was restarted."""

    folder: Path
    store: CacheStore
    plain: Engine
    ours: Engine
    own: OwnTier
    space: KVSpace

    def values(self) -> ValuesFile:
        """The store's."""
        return ValuesFile(self.folder / "store" / "data" / "values", self.store.address)

    def bench(self) -> Bench:
        """Nothing measured yet."""
        return Bench(self.plain, self.ours, self.space, defaultdict(list), defaultdict(list))

    def restart_store(self) -> None:
        """With everything on its disk only, until it has been asked for."""
        port = int(self.store.address.rsplit(":", 1)[1])
        self.store.service.stop()
        self.store = start_cachestore(self.folder / "store", memory_bytes=2 << 30, port=port)
        time.sleep(3)  # for the engines to find it again


def measure_length(
    stage: Stage, scene: Scene, rounds: int, rng: random.Random
) -> dict[str, object]:
    """All cases with prompts of one length."""
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
    """Measure; returns the figures of the JSON line, those of the shortest prompt first.

    rounds: in place of ROUNDS.
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
