"""What the connector's worker asks of a GPU in the steps of a save, a load and a blend.

::

    python -m tools.device.stages.worker_steps --folder DIR

The worker, its passes and a real store run on the simulated GPU (``simulated_gpu``). Launches of
the model itself are counted apart. Bits are compared with what the CPU's code gives.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when kernels are imported

import torch

from harness.processes import start_cachestore
from ragcache_core.blend.token_selection import InfluencedChunk
from ragcache_core.identity.keys import VariantKey
from ragcache_core.identity.variant import Origin, Provenance, VariantInfo
from ragcache_core.store_api import AsOf, LookupKey
from ragcache_engine.blend.attention import AttentionObserver
from ragcache_engine.blend.chunk_shift import ChunkShift
from ragcache_engine.blend.components import BlendComponents
from ragcache_engine.blend.recomputer import Recomputer
from ragcache_engine.kv_cache import paged_cache
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.context import EngineContext
from ragcache_engine.protocol.messages import (
    ComputedRange,
    LoadJob,
    LoadOutcome,
    ObserveJob,
    RecomputeJob,
    SaveJob,
    StepJobs,
    VariantSpan,
)
from ragcache_engine.worker.worker import ConnectorWorker
from ragcache_kv.rotation import KeyRotation, Rope
from ragcache_kv.store_client.sharded import ShardedStore
from ragcache_kv.values.layout import value_bytes
from ragcache_wire.settings import EngineSettings
from ragcache_wire.watched.members import FixedMembers
from tools.device.report import require, run_stage
from tools.device.run import WORKER_STAGE
from tools.device.simulated_gpu import DEVICE, SimulatedGpu, Work, simulated_gpu
from tools.device.simulated_model import (
    BLOCK_TOKENS,
    MODEL_LAUNCHES,
    ROPE,
    SPACE,
    VOCABULARY,
    SimulatedModel,
)

NUM_CHUNKS, CHUNK_TOKENS, MOVED_BY = 8, 40, 24
"""The chunks begin and end inside blocks. Other prompts have them MOVED_BY tokens later."""

QUESTION_TOKENS = 32
LENGTH = NUM_CHUNKS * CHUNK_TOKENS
SCRATCH = tuple(range(100, 108))
DOMAIN = "tenant"
WAIT_S = 60.0


class Steps:
    """A worker on a simulated GPU, and the steps of an engine."""

    def __init__(self, gpu: SimulatedGpu, store: str, rope: Rope = ROPE) -> None:
        self.gpu = gpu
        self.model = SimulatedModel.make(gpu, 128)
        self.cache = PagedCache(self.model.named_layers(), DEVICE)
        recomputer = Recomputer(self.model.loaded())
        recomputer.chunk_shift = ChunkShift(self.cache, rope)
        self.recomputer = recomputer
        self.rotation = KeyRotation(rope, SPACE.dtype)
        observer = AttentionObserver(self.cache, recomputer)
        settings = EngineSettings(cachestore=FixedMembers((store,)))
        self.client = ShardedStore(settings.cachestore)
        self.worker = ConnectorWorker(
            EngineContext(settings, SPACE),
            self.cache,
            self.client,
            BlendComponents(self.rotation, recomputer, observer),
        )
        self.worker.wait_until_warm()
        rng = random.Random(0)
        self.token_ids = [rng.randrange(VOCABULARY) for _ in range(LENGTH + MOVED_BY)]
        self.question = [rng.randrange(VOCABULARY) for _ in range(QUESTION_TOKENS)]
        self.spans = [
            VariantSpan(VariantKey(bytes([n + 1]) * 16, bytes(16)), start, start + CHUNK_TOKENS)
            for n, start in enumerate(range(0, LENGTH, CHUNK_TOKENS))
        ]
        count = -(-(LENGTH + MOVED_BY + QUESTION_TOKENS) // BLOCK_TOKENS)
        self.blocks = tuple(rng.sample(range(1, 50), count))
        self.other_blocks = tuple(rng.sample(range(50, 99), count))

    def save(self) -> Work:
        """Compute a prompt and save its chunks; return the work of the worker's hooks."""
        jobs = StepJobs(
            saves=tuple(self._save_job(span) for span in self.spans),
            computed=(ComputedRange("a", 0, LENGTH),),
            num_tokens=LENGTH,
            prompt_tokens=LENGTH,
        )
        self.gpu.take_work()
        self.worker.begin_step(jobs)
        works = [self.gpu.take_work()]
        self.recomputer.recompute(self.token_ids, self.blocks, [range(LENGTH)])
        self.gpu.take_work()
        self.worker.end_pass(jobs)
        self.worker.advance((), busy=True)
        self.worker.begin_step(StepJobs())
        works.append(self.gpu.take_work())
        keys = [LookupKey.for_variant(span.variant) for span in self.spans]
        _wait(lambda: all(one.stored for one in self.client.lookup(keys, WAIT_S).variants))
        self.gpu.finish()
        return _sum(works)

    def load(self) -> Work:
        """Load the chunks into other blocks; compare bits."""
        job = LoadJob("b", tuple(self.spans), 0, LENGTH, self.other_blocks, DOMAIN)
        _, work = self._run(job)
        same = torch.equal(self._kv(self.other_blocks, 0), self._kv(self.blocks, 0))
        require(same, "loaded KV has other bits than the computed one")
        return work

    def move(self) -> Work:
        """Load the chunks at other positions, recompute nothing; compare bits."""
        outcome, work = self._run(self._moved(0))
        require(not outcome.recomputed_tokens, "tokens were recomputed")
        expected = self._kv(self.blocks, 0)
        for chunk in expected.split(CHUNK_TOKENS, dim=2):
            moved = chunk.contiguous()
            chunk.copy_(self.rotation.rotate_part(moved, MOVED_BY))
        same = torch.equal(self._kv(self.other_blocks, MOVED_BY), expected)
        require(same, "moved KV has other bits than those that the CPU rotates")
        return work

    def blend(self) -> Work:
        """Load the chunks at other positions, and recompute a part of them."""
        outcome, work = self._run(self._moved(LENGTH // 6))
        require(outcome.recomputed_tokens > 0, "no token was recomputed")
        return work

    def observe(self) -> Work:
        """Observe how the chunks attend to those before them."""
        saves = {n: self._save_job(span) for n, span in enumerate(self.spans) if n}
        segments = tuple(range(span.start, span.end) for span in self.spans)
        chunks = tuple(span.variant.chunk for span in self.spans)
        job = ObserveJob("c", self.token_ids[:LENGTH], self.blocks, segments, chunks, saves)
        self.gpu.take_work()
        self.worker.start_loads(StepJobs(observes=(job,)))

        def released() -> bool:
            self.worker.advance((), busy=False)
            self.gpu.finish()
            return "c" in self.worker.take_released()

        _wait(released)
        return self.gpu.take_work()

    def _moved(self, recompute_tokens: int) -> LoadJob:
        spans = tuple(
            VariantSpan(span.variant, span.start + MOVED_BY, span.end + MOVED_BY, span.start)
            for span in self.spans
        )
        rng = random.Random(1)
        chunks = tuple(
            InfluencedChunk(span.start, [rng.random() for _ in range(CHUNK_TOKENS)])
            for span in spans
        )
        prompt = [*self.token_ids[: LENGTH + MOVED_BY], *self.question]
        recompute = RecomputeJob(MOVED_BY, prompt, chunks, (), recompute_tokens, SCRATCH)
        end = LENGTH + MOVED_BY
        return LoadJob("d", spans, MOVED_BY, end, self.other_blocks, DOMAIN, recompute)

    def _run(self, job: LoadJob) -> tuple[LoadOutcome, Work]:
        self.gpu.take_work()
        self.worker.start_loads(StepJobs(loads=(job,)))
        # All values arrive before the next step, so that the counts do not depend on the time.
        running = self.worker._loader._loads[job.request_id]
        _wait(lambda: running.spans_fetched == len(job.spans))

        def received() -> bool:
            self.worker.advance((), busy=False)
            self.gpu.finish()
            return job.request_id in self.worker.take_received()

        _wait(received)
        work = self.gpu.take_work()
        report = self.worker.take_report()
        assert report is not None
        [outcome] = report.outcomes
        require(not outcome.reason, outcome.reason)
        return outcome, work

    def _save_job(self, span: VariantSpan) -> SaveJob:
        size = span.end - span.start
        info = VariantInfo(size, value_bytes(SPACE, size), span.start, Provenance(exact=True))
        origin = Origin((bytes(16),), None, DOMAIN, "c/a")
        as_of: Mapping[str, AsOf] = {}
        return SaveJob("a", span, info, origin, as_of, self.blocks)

    def _kv(self, blocks: Sequence[int], start: int) -> torch.Tensor:
        """Return the KV of the chunks' tokens, on the CPU, without counting."""
        positions = torch.arange(start, start + LENGTH)
        of_token = torch.tensor(blocks)[positions // BLOCK_TOKENS]
        layers = [
            self.gpu.numbers(layer.kv_cache)[of_token, :, positions % BLOCK_TOKENS]
            for layer in self.model.layers
        ]
        return torch.stack(layers).unflatten(-1, (2, -1)).permute(0, 3, 1, 2, 4).contiguous()


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the worker has not finished")
        time.sleep(0.001)


def _sum(works: Sequence[Work]) -> Work:
    total = Work()
    for work in works:
        total.launches += work.launches
        total.copies += work.copies
        total.host_waits += work.host_waits
    return total


def _figures(work: Work) -> dict[str, Any]:
    own = {name: n for name, n in work.launches.items() if name not in MODEL_LAUNCHES}
    writes = work.launches["write KV"]
    return {
        "launches": sum(own.values()),
        "cache_writes": writes,
        "model_launches": work.launches["model"] + work.launches["attention"],
        "copies": work.copies,
        "host_waits": work.host_waits.total(),
        "waits_at": dict(work.host_waits),
        "by_operation": own,
    }


def main() -> int:
    """Run the stage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument(
        "--one-layer",
        action="store_true",
        help="save, load and move one layer at a time, and rotate each one differently",
    )
    given = parser.parse_args()
    store = start_cachestore(given.folder / "store")
    rope = ROPE
    if given.one_layer:
        paged_cache.STAGED_BYTES = 1
        slower = tuple(
            tuple(one / (index + 1) for one in ROPE.frequencies)
            for index in range(SPACE.num_layers)
        )
        rope = replace(ROPE, by_layer=slower)

    def measure() -> dict[str, Any]:
        with simulated_gpu() as gpu:
            steps = Steps(gpu, store.address, rope)
            works = {"save": steps.save(), "load": steps.load(), "move": steps.move()}
            if not given.one_layer:
                works |= {"blend": steps.blend(), "observe": steps.observe()}
            steps.worker.close()
        steps_of = {name: _figures(work) for name, work in works.items()}
        return {"steps": steps_of, "chunks": NUM_CHUNKS, "layers": SPACE.num_layers}

    try:
        return 0 if run_stage(WORKER_STAGE, measure) else 1
    finally:
        store.service.stop()


if __name__ == "__main__":
    sys.exit(main())
