"""Copies layers out of the paged cache as they are computed, while the next ones are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from ragcache_core.keys import VariantKey
from ragcache_core.variant import Part
from ragcache_engine.moment import Moment
from ragcache_engine.paged_cache import PagedCache
from ragcache_engine.threads import side_pool
from ragcache_engine.transfer import SaveJob
from ragcache_engine.values import native_bytes
from ragcache_kv.value import checksum


@dataclass(frozen=True, slots=True)
class Staged:
    """A value that has been copied out. value: [num_layers, 2, T, num_kv_heads, head_dim], CPU.

    parts: waits until the last copy has ended, and gives a checksum for each layer.
    """

    value: torch.Tensor
    parts: Callable[[], tuple[Part, ...]]


@dataclass(frozen=True, slots=True)
class _Filling:
    job: SaveJob
    value: torch.Tensor
    parts: dict[int, Future[Part]]


class Staging:
    """Values of the forward pass that runs. Called on the worker's main thread.

    A store wants every checksum before the first byte, so that a value is sent when its last layer
    has come. Until then the layers before it have been copied and summed up beside the pass.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._pool = side_pool(1, "ragcache-stage")
        self._filling: dict[VariantKey, _Filling] = {}

    def begin(self, jobs: Iterable[SaveJob]) -> None:
        """A pass begins that completes what jobs are to save."""
        self._filling = {}
        for job in jobs:
            value = self._cache.empty(job.span.end - job.span.start)
            self._filling.setdefault(job.span.variant, _Filling(job, value, {}))

    def add(self, layer: int) -> None:
        """A layer has written its KV. Outside of a pass that was begun this does nothing."""
        for filling in self._filling.values():
            self._copy(filling, layer)

    def take(self, job: SaveJob) -> Staged | None:
        """The value of one of the pass's jobs, once; None: not begun, or taken.

        Layers that nobody has told of are copied now: of a pass that was replayed as one CUDA graph
        all of them are.
        """
        filling = self._filling.pop(job.span.variant, None)
        if filling is None:
            return None
        for layer in range(self._cache.num_layers):
            if layer not in filling.parts:
                self._copy(filling, layer)
        sums = [filling.parts[layer] for layer in range(self._cache.num_layers)]
        return Staged(filling.value, lambda: tuple(one.result() for one in sums))

    def end(self) -> None:
        """The pass has ended; what else runs through the model is not for saving."""
        self._filling = {}

    def close(self) -> None:
        """Drop what is under way."""
        self._filling = {}
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _copy(self, filling: _Filling, layer: int) -> None:
        span, out = filling.job.span, filling.value[layer]
        self._cache.read_layer(layer, filling.job.blocks, span.start, span.end, out)
        filling.parts[layer] = self._pool.submit(_part, out, self._cache.moment())


def _part(layer: torch.Tensor, copied: Moment) -> Part:
    """The part that layer is, when it has been copied."""
    copied.wait()
    raw = native_bytes(layer)
    return Part(len(raw), checksum(raw))
