"""Compares loading a prompt's chunks from an engine's host tier and from the store.

The connector's worker side runs twice over one real store, with a host tier that has the chunks and
without one. Each load is fetched, handed over, and written by vLLM's own CPU backend into a paged
cache with a small model's shape; no model runs. Rounds are interleaved; figures are medians.
``exact``: chunks at their own positions. ``moved``: each 100 tokens further, with rotated keys. The
written blocks are compared bit by bit, and the sources of the values are counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a program

import torch
from vllm import _custom_ops as custom_ops

from bench.support.processes import running_cachestore
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.identity.variant import Origin, Provenance, VariantInfo
from ragcache_core.store_api import NewVariant
from ragcache_engine.blend.components import BlendComponents
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.kv_cache.value_tensors import native_bytes, value_shape
from ragcache_engine.protocol.messages import (
    LoadJob,
    LoadOutcome,
    RecomputeJob,
    StepJobs,
    VariantSpan,
)
from ragcache_engine.worker.worker import ConnectorWorker
from ragcache_kv.rotation import KeyRotation, Pairing, Rope
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.layout import FORMAT, value_bytes, value_parts
from ragcache_kv.values.outgoing_value import ReadyValue
from ragcache_wire.settings import EngineSettings
from ragcache_wire.watched.members import FixedMembers

SPACE = KVSpace("bench", num_layers=12, num_kv_heads=4, head_dim=64, dtype="bfloat16")
ROTATION = KeyRotation(
    Rope(64, 64, Pairing.HALVES, tuple(1e4 ** (-pair / 32) for pair in range(32))), "bfloat16"
)
CHUNK_TOKENS = (48, 256, 251, 240, 256, 197, 256, 249, 167)
BLOCK_TOKENS = 128
MOVED_BY = 100
DOMAIN = "public"
TIMEOUT_S = 60.0
POLL_S = 1e-4
WARM_UP = 4
"""Warm-up rounds that connect, compile and fill; in these the written blocks are compared."""


class Layer:
    """An attention layer with vLLM's CPU kernel, without a model."""

    def __init__(self, num_blocks: int) -> None:
        heads, dim = SPACE.num_kv_heads, SPACE.head_dim
        self.kv_cache = torch.zeros(num_blocks, heads, BLOCK_TOKENS, 2 * dim, dtype=torch.bfloat16)
        self.impl = self
        self._isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"

    def do_kv_cache_update(
        self,
        layer: Layer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write KV as vLLM's CPU backend does."""
        blocks, heads, size, _ = kv_cache.shape
        keys, values = kv_cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
        custom_ops.cpu_attn_reshape_and_cache(
            key, value, keys, values, slots, self._isa, kv_cache_dtype="auto"
        )


class NoModel:
    """Replaces the recomputation of a blend: these loads have nothing to recompute."""

    max_tokens = 1
    max_runs = 1


@dataclass
class Worker:
    """A worker side with the tiers of its config, over its own cache."""

    address: str
    host_tier_bytes: int
    times_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    came_from: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        members = FixedMembers((self.address,))
        config = EngineSettings(cachestore=members, host_tier_bytes=self.host_tier_bytes)
        num_blocks = -(-(sum(CHUNK_TOKENS) + MOVED_BY) // BLOCK_TOKENS)
        self.blocks = tuple(random.sample(range(num_blocks), num_blocks))
        layers = {f"layer.{n}": Layer(num_blocks) for n in range(SPACE.num_layers)}
        self.cache = PagedCache(layers, torch.device("cpu"))
        blender = BlendComponents(ROTATION, cast("Any", NoModel()), cast("Any", None))
        self.side = ConnectorWorker(config, SPACE, self.cache, ShardedStore(members), blender)

    def load(self, case: str, keys: list[VariantKey]) -> tuple[int, int]:
        """Load all chunks in order; return the tokens of the blocks that they fill."""
        shift = MOVED_BY if case == "moved" else 0
        spans, start = [], 0
        for key, tokens in zip(keys, CHUNK_TOKENS, strict=True):
            base = start if shift else None
            spans.append(VariantSpan(key, start + shift, start + shift + tokens, base))
            start += tokens
        end = start + shift
        # A blend without recomputation ends with its load.
        recompute = RecomputeJob(shift, (), (), (), 0, ()) if shift else None
        name, deadline_s = uuid.uuid4().hex, TIMEOUT_S
        job = LoadJob(
            *(name, tuple(spans), shift, end, self.blocks, DOMAIN, recompute), deadline_s=deadline_s
        )
        began = time.perf_counter()
        outcome = self._until_loaded(job)
        self.times_s[case].append(time.perf_counter() - began)
        if outcome.reason:
            raise RuntimeError(f"a load failed: {outcome.reason}")
        self.came_from[case] += outcome.values_by_tier
        return shift, end

    def _until_loaded(self, job: LoadJob) -> LoadOutcome:
        self.side.start_loads(StepJobs(loads=(job,)))
        deadline = time.monotonic() + TIMEOUT_S
        while not self.side.take_received():
            if time.monotonic() > deadline:
                raise RuntimeError("a load never ended")
            time.sleep(POLL_S)
            self.side.advance((), busy=False)
        report = self.side.take_report()
        assert report is not None
        return report.outcomes[0]

    def forget(self) -> None:
        self.times_s.clear()
        self.came_from.clear()


def put_all(address: str) -> list[VariantKey]:
    """Store a value for each chunk."""
    client = ShardedStore(FixedMembers((address,)))
    keys, start = [], 0
    for tokens in CHUNK_TOKENS:
        key = VariantKey(uuid.uuid4().bytes, uuid.uuid4().bytes)
        dims = (SPACE.num_layers, 2, tokens, SPACE.num_kv_heads, SPACE.head_dim)
        raw = native_bytes(torch.randn(dims).bfloat16())
        info = VariantInfo(tokens, len(raw), start, Provenance(exact=True))
        sizes, origin = value_parts(SPACE, tokens), Origin(domain=DOMAIN)
        new = NewVariant(key, info, origin, value_shape(SPACE), sizes, FORMAT)
        client.put(new, ReadyValue.with_checksums(raw, sizes), TIMEOUT_S)
        keys.append(key)
        start += tokens
    client.close()
    return keys


def run(rounds: int, folder: Path) -> dict[str, object]:
    """Measure and return the figures of the JSON line."""
    size = value_bytes(SPACE, sum(CHUNK_TOKENS))
    with running_cachestore(folder, memory_bytes=8 * size) as store:
        keys = put_all(store.address)
        workers = {
            "store": Worker(store.address, 0),
            "tier": Worker(store.address, 4 * size),
        }
        for number in range(rounds + WARM_UP):
            if number == WARM_UP:
                for worker in workers.values():
                    worker.forget()
            for case in ("exact", "moved"):
                names = random.sample(list(workers), len(workers))
                loaded = {name: workers[name].load(case, keys) for name in names}
                if number < WARM_UP:
                    _compare(workers, loaded)
            time.sleep(0.02)  # for background work after a load
        for name, worker in workers.items():
            expected = {"store": "store", "tier": "host"}[name]
            if {index for indices in worker.came_from.values() for index in indices} != {expected}:
                raise RuntimeError(f"not all came from where it should: {worker.came_from}")
            worker.side.close()
    ms = {
        name: {case: round(statistics.median(t) * 1e3, 2) for case, t in worker.times_s.items()}
        for name, worker in workers.items()
    }
    least = {
        name: {case: round(min(t) * 1e3, 2) for case, t in worker.times_s.items()}
        for name, worker in workers.items()
    }
    return {
        "rounds": rounds,
        "tokens": sum(CHUNK_TOKENS),
        "mib": round(size / 2**20, 1),
        "ms": ms,
        "least_ms": least,
        "load_store_over_tier_exact": round(ms["store"]["exact"] / ms["tier"]["exact"], 2),
        "load_store_over_tier_moved": round(ms["store"]["moved"] / ms["tier"]["moved"], 2),
    }


def _compare(workers: dict[str, Worker], loaded: dict[str, tuple[int, int]]) -> None:
    """Raise RuntimeError unless the blocks of both are bit-equal."""
    written = []
    for name, (start, end) in loaded.items():
        worker = workers[name]
        written.append(worker.cache.read(worker.blocks, start, end))
    if not torch.equal(*written):
        raise RuntimeError("a tier has given other KV than the store")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="60 rounds, not 400")
    quick = parser.parse_args().quick
    # Two busy cores would wait for each other at every layer.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(60 if quick else 400, Path(folder))))


if __name__ == "__main__":
    main()
