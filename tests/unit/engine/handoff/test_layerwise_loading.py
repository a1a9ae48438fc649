"""Deferred layers are in place before they are needed, and in no other request's blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.identity.keys import VariantKey
from ragcache_engine.handoff.layerwise_loading import LayerwiseLoader
from ragcache_engine.kv_cache.block_writer import BlockWriter, PlacedValue
from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.incoming_value import IncomingValue, NativeValue
from ragcache_engine.kv_cache.paged_cache import CacheShape, PagedCache
from ragcache_engine.protocol.messages import LoadJob, RecomputeJob, VariantSpan

CPU = torch.device("cpu")
LAYERS = 4
BLOCK = 4
LENGTH = 10


class FakeCache:
    """Slots of every layer, zero if empty, and a clock that advances with each write."""

    device = CPU
    num_layers = LAYERS

    def __init__(self) -> None:
        self.shape = CacheShape(1, BLOCK, 1, torch.float32)
        self.written = torch.zeros(LAYERS, 32 * BLOCK)
        self.seconds = 0.0
        self.broken_layer: int | None = None

    def slots(self, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        return PagedCache.slots(cast("PagedCache", self), blocks, start, end)

    def record_event(self) -> DeviceEvent:
        return DeviceEvent(CPU, lambda: self.seconds)

    def write(self, value: torch.Tensor, slots: torch.Tensor, first_layer: int = 0) -> None:
        for index, tokens in enumerate(value, first_layer):
            if index == self.broken_layer:
                raise RuntimeError("device error")
            self.written[index, slots] = tokens[0, :, 0, 0]
            self.seconds += len(slots) / 1000


def blocks_of(number: int) -> tuple[int, ...]:
    return tuple(range(3 * number, 3 * number + 3))


def make_job(name: str, blocks: Sequence[int], compute_s: float | None = None) -> LoadJob:
    span = VariantSpan(VariantKey(name.encode().ljust(16), bytes(16)), 0, LENGTH)
    return LoadJob(name, (span,), 0, LENGTH, tuple(blocks), "d", compute_s=compute_s)


def make_arrival(job: LoadJob) -> IncomingValue:
    value = torch.arange(1, LENGTH + 1).float().view(1, 1, LENGTH, 1, 1)
    return IncomingValue(
        job.spans[0], NativeValue(value.expand(LAYERS, 2, LENGTH, 1, 1).contiguous())
    )


class Bench:
    def __init__(self, depth: Callable[[LoadJob], int] | None = None) -> None:
        self.cache = FakeCache()
        cache = cast("PagedCache", self.cache)
        self.loader = LayerwiseLoader(cache, BlockWriter(cache, None), depth)

    def load(self, job: LoadJob) -> None:
        self.loader.write(job, [PlacedValue(make_arrival(job), 0, LENGTH)])

    def layers_of(self, job: LoadJob) -> list[bool]:
        """Tell for each layer whether it is in place."""
        slots = self.cache.slots(job.blocks, 0, LENGTH)
        wanted = torch.arange(1, LENGTH + 1).float()
        return [bool((layer[slots] == wanted).all()) for layer in self.cache.written]


@given(depths=st.lists(st.integers(1, LAYERS), min_size=1, max_size=3))
def test_every_layer_is_in_place_when_it_is_needed(depths: list[int]) -> None:
    jobs = [make_job(str(n), blocks_of(n)) for n in range(len(depths))]
    bench = Bench(lambda job: depths[int(job.request_id)])
    for job, depth in zip(jobs, depths, strict=True):
        bench.load(job)
        assert bench.layers_of(job) == [True] * depth + [False] * (LAYERS - depth)
    bench.loader.begin_pass()
    for layer in range(LAYERS):
        bench.loader.wait_for_layer(layer)
        assert all(bench.layers_of(job)[layer] for job in jobs)
    assert bench.loader.end_pass() == []
    assert all(all(bench.layers_of(job)) for job in jobs)


def test_written_layers_are_not_written_again() -> None:
    bench = Bench(lambda job: 2)
    job = make_job("a", blocks_of(0))
    bench.load(job)
    for _ in range(2):
        bench.loader.begin_pass()
        for layer in range(LAYERS):
            bench.loader.wait_for_layer(layer)
        assert bench.loader.end_pass() == []
        bench.cache.written[:] = 0
    assert bench.layers_of(job) == [False] * LAYERS


def test_layers_of_a_finished_request_are_not_written_in_a_pass() -> None:
    """Another request may have its blocks by then."""
    bench = Bench(lambda job: 1)
    bench.load(job := make_job("a", blocks_of(0)))
    assert bench.loader.write_deferred(["a", "unknown"]) == []
    assert bench.layers_of(job) == [True] * LAYERS
    bench.cache.written[:] = 0
    bench.loader.begin_pass()
    for layer in range(LAYERS):
        bench.loader.wait_for_layer(layer)
    assert bench.loader.end_pass() == []
    assert not bench.cache.written.any()


def test_a_recomputation_pass_completes_no_load() -> None:
    bench = Bench(lambda job: 1)
    bench.load(job := make_job("a", blocks_of(0)))
    for layer in range(LAYERS):
        bench.loader.wait_for_layer(layer)
    assert bench.layers_of(job) == [True, False, False, False]


@pytest.mark.parametrize("asked", [(), (0,), (0, 1, 2), (1, 2, 3)])
def test_a_pass_that_does_not_wait_for_each_layer_is_reported(asked: Sequence[int]) -> None:
    bench = Bench(lambda job: 1)
    jobs = [make_job(str(n), blocks_of(n)) for n in range(2)]
    for job in jobs:
        bench.load(job)
    bench.loader.begin_pass()
    for layer in asked:
        bench.loader.wait_for_layer(layer)
    assert bench.loader.end_pass() == jobs
    later = make_job("later", blocks_of(3))
    bench.load(later)
    assert all(bench.layers_of(later))  # nothing is deferred any more
    bench.loader.begin_pass()
    assert bench.loader.end_pass() == []


def test_a_failed_layer_write_is_reported_for_its_pass() -> None:
    """Only for that pass: a device error may be temporary."""
    bench = Bench(lambda job: 1)
    bench.load(job := make_job("a", blocks_of(0)))
    bench.cache.broken_layer = 2
    assert bench.loader.begin_pass()
    for layer in range(LAYERS):
        bench.loader.wait_for_layer(layer)
    bench.cache.broken_layer = None
    assert bench.loader.end_pass() == [job]
    assert all(bench.layers_of(job)), (
        "vLLM may not report bad blocks to all requests that share them"
    )
    bench.load(job := make_job("b", blocks_of(1)))
    assert bench.layers_of(job) == [True, False, False, False]


def test_a_failed_write_of_deferred_layers_is_reported() -> None:
    bench = Bench(lambda job: 1)
    jobs = [make_job(str(n), blocks_of(n)) for n in range(2)]
    for job in jobs:
        bench.load(job)
    bench.cache.broken_layer = 3
    assert bench.loader.write_deferred(["0"]) == [jobs[0]]
    bench.cache.broken_layer = None
    assert bench.loader.write_deferred(["0", "1"]) == []
    assert bench.layers_of(jobs[1]) == [True] * LAYERS


def test_layers_deferred_during_a_pass_are_written_in_the_next_one() -> None:
    bench = Bench(lambda job: 1)
    bench.load(first := make_job("a", blocks_of(0)))
    bench.loader.begin_pass()
    for layer in range(LAYERS):
        bench.loader.wait_for_layer(layer)
    bench.load(second := make_job("b", blocks_of(1)))
    assert bench.loader.end_pass() == []
    assert all(bench.layers_of(first))
    assert bench.layers_of(second) == [True, False, False, False]
    bench.loader.begin_pass()
    for layer in range(LAYERS):
        bench.loader.wait_for_layer(layer)
    assert bench.loader.end_pass() == []
    assert all(bench.layers_of(second))


def test_a_pass_without_deferred_layers_is_known() -> None:
    bench = Bench(lambda job: LAYERS)
    bench.load(make_job("a", blocks_of(0)))
    assert not bench.loader.begin_pass()
    assert bench.loader.end_pass() == []


def test_all_layers_of_a_load_with_recomputation_are_written_at_once() -> None:
    bench = Bench(lambda job: 1)
    job = make_job("a", blocks_of(0))
    recompute = RecomputeJob(0, range(LENGTH), (), (), 0, ())
    approximate = LoadJob("a", job.spans, 0, LENGTH, job.blocks, "d", recompute)
    bench.load(approximate)
    assert all(bench.layers_of(approximate))


def test_the_number_of_first_layers_follows_equation_16() -> None:
    """A layer of a job takes 10 ms to write. All layers take 40 ms to load, 20 ms to compute."""
    bench = Bench()
    for number in range(4):  # until the time of writes is known
        bench.load(job := make_job(str(number), blocks_of(number), compute_s=0.02))
        assert all(bench.layers_of(job))
    bench.load(job := make_job("loads long", blocks_of(4), compute_s=0.02))
    # (4 - 1) * (1 - 20 / 40) + 1 = 2.5
    assert bench.layers_of(job) == [True, True, True, False]
    bench.load(job := make_job("computes long", blocks_of(5), compute_s=0.2))
    assert bench.layers_of(job) == [True, False, False, False]
    bench.load(job := make_job("unknown", blocks_of(6)))
    assert all(bench.layers_of(job))
