"""Time to first token when a prompt is put together from chunks of other prompts.

A model with random weights that is large enough for prefill to be what takes the time. Chunks are
captured in prompts of their own; then each is asked for at another place, behind chunks that it has
never seen, and a share of its tokens is recomputed. Interleaved, warmed up, medians:

full: plain vLLM, without our connector and its own prefix cache. prefix_cache: vLLM's own, hit in
full. exact: a prompt as it was captured, all of it out of the store. blend0, blend15, blend30: so
many percent recomputed. The store has all of it in memory, for ``_disk`` on its disk only.

``where`` says where a request's time goes, by the engine's own record, the rest being its server's:
queue (the store's lookup, scheduling), load (fetching, turning and writing KV), repair (the
question's look and the recomputed tokens), prefill (the question).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

from bench.completion import complete, record_of
from bench.processes import (
    COMPUTES_PLAIN,
    CacheStore,
    Engine,
    launch_engine,
    start_cachestore,
    wait_for_engine,
)
from ragcache_core.blend.observation import observation_key
from ragcache_core.keys import KVSpace, VariantKey
from ragcache_core.prompt import Prompt, assemble, plan_blend, plan_exact
from ragcache_core.reuse import checked_segments
from ragcache_core.storing import Want
from ragcache_kv.model_folder import load_model_folder
from ragcache_kv.store.client import StoreClient
from ragcache_wire.v1 import engine_pb2
from tests.tiny_model import make_tiny_model

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
        places = range(len(self.chunks[0]))
        chunks = [self.chunks[(place + number) % len(self.chunks)][place] for place in places]
        rng.shuffle(chunks)
        return assemble(self.head, chunks, self.question)


@dataclass(slots=True)
class Bench:
    """Engines and what was measured. times_s: by case. records: of ours, by case."""

    plain: Engine
    ours: Engine
    space: KVSpace
    times_s: defaultdict[str, list[float]]
    records: defaultdict[str, list[engine_pb2.RequestRecord]]

    def full(self, prompt: Prompt) -> None:
        answer = complete(self.plain.url, prompt.token_ids, max_tokens=ANSWER_TOKENS)
        self.times_s["full"].append(answer.ttft_s)

    def prefix_cache(self, prompt: Prompt) -> None:
        salt = uuid.uuid4().hex
        for _ in range(2):
            answer = complete(
                self.ours.url, prompt.token_ids, max_tokens=ANSWER_TOKENS, cache_salt=salt
            )
        self.times_s["prefix_cache"].append(answer.ttft_s)

    def reuse(self, case: str, prompt: Prompt, budget: float | None) -> None:
        """budget None: exact."""
        request = uuid.uuid4().hex
        if budget is None:
            plan = plan_exact(prompt, self.space, DOMAIN, request)
        else:
            plan = plan_blend(prompt, self.space, DOMAIN, request, budget)
        answer = complete(
            self.ours.url,
            prompt.token_ids,
            max_tokens=ANSWER_TOKENS,
            plan=plan.to_json(),
            cache_salt=request,  # hides what the engine has itself
        )
        self.times_s[case].append(answer.ttft_s)
        self.records[case].append(record_of(self.ours, request))


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
    wants = [Want.of(key) for v in variants for key in (v, observation_key(v))]
    deadline = time.monotonic() + STORED_S
    while not all(found.held for found in client.lookup(wants, timeout_s=5).variants):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine did not save and observe its chunks in {STORED_S} s")
        time.sleep(0.05)
    client.close()


def measure(bench: Bench, scene: Scene, rounds: int, rng: random.Random, suffix: str) -> None:
    """rounds of each case, one after the other."""
    for number in range(rounds):
        blended = scene.blended(number, rng)
        bench.full(blended)
        if not suffix:
            bench.prefix_cache(blended)
        bench.reuse(f"exact{suffix}", scene.captured(number), None)
        for case, budget in BUDGETS.items():
            if not suffix or case == "blend15":
                bench.reuse(f"{case}{suffix}", blended, budget)
        last = {case: f"{times[-1] * 1e3:.0f}" for case, times in bench.times_s.items()}
        print(f"round {number + 1}{suffix}: {last} ms", file=sys.stderr)


def figures(bench: Bench) -> dict[str, object]:
    """Medians in ms, where they went, and what was recomputed."""
    ms = {case: _median_ms(times) for case, times in bench.times_s.items()}
    where = {
        case: {
            "queue": _median_ms([r.queue_s for r in records]),
            "load": _median_ms([r.load_s - r.repair_s for r in records]),
            "repair": _median_ms([r.repair_s for r in records]),
            "prefill": _median_ms([r.prefill_s for r in records]),
        }
        for case, records in bench.records.items()
    }
    shares = {
        case: round(
            statistics.median(r.repaired_tokens / max(1, r.blended_tokens) for r in records), 4
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
    with contextlib.ExitStack() as stack:
        store = start_cachestore(folder / "store", memory_bytes=2 << 30)
        stack.callback(lambda: store.service.stop())  # noqa: PLW0108  it is another by then
        length = 1024 + 2048 * max(repeats)
        plain = launch_engine(folder, model, None, "--no-enable-prefix-caching", max_length=length)
        stack.callback(plain.service.stop)
        ours = launch_engine(
            folder, model, store.address, max_length=length, settings=COMPUTES_PLAIN
        )
        stack.callback(ours.service.stop)
        wait_for_engine(plain)
        wait_for_engine(ours)
        for repeat in repeats:
            scene = Scene.make(rng, vocabulary, repeat)
            bench = Bench(plain, ours, loaded.space("auto"), defaultdict(list), defaultdict(list))
            print(f"capturing prompts of {repeat * 2}k tokens", file=sys.stderr)
            capture(bench, store, scene)
            measure(bench, scene, 2, rng, "")  # warms up
            bench.times_s.clear()
            bench.records.clear()
            measure(bench, scene, rounds or ROUNDS[repeat], rng, "")
            found = figures(bench)
            # Restarted, the store has everything on its disk only, until it has been asked twice.
            port = int(store.address.rsplit(":", 1)[1])
            store.service.stop()
            store = start_cachestore(folder / "store", memory_bytes=2 << 30, port=port)
            time.sleep(3)  # for the engine to find it again
            disk = Bench(plain, ours, bench.space, defaultdict(list), defaultdict(list))
            unread = len(scene.chunks) // 2
            measure(disk, scene, min(unread, rounds or ROUNDS[repeat]), rng, "_disk")
            on_disk = figures(disk)
            ms, disk_ms = found["ms"], on_disk["ms"]
            assert isinstance(ms, dict)
            assert isinstance(disk_ms, dict)
            found |= {
                "ttft_full_over_blend15": _ratio(ms, "blend15"),
                "ttft_full_over_exact": _ratio(ms, "exact"),
                "ttft_full_over_blend15_disk": _ratio(disk_ms, "blend15_disk"),
                "ttft_full_over_exact_disk": _ratio(disk_ms, "exact_disk"),
                "disk": on_disk,
                "prompt_tokens": len(scene.captured(0).token_ids),
            }
            result |= found if repeat == repeats[0] else {f"{repeat * 2}k": found}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 rounds of 2k tokens only")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(4 if quick else None, (1,) if quick else (1, 4), Path(folder))))


if __name__ == "__main__":
    main()
