"""Copies layers out of the paged cache as they are computed, while the next ones are."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence

import torch

from ragcache_core.identity.keys import VariantKey
from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.kv_cache.value_tensors import native_bytes
from ragcache_engine.protocol.messages import SaveJob
from ragcache_engine.threads import unpinned_pool
from ragcache_kv.values.layout import checksum
from ragcache_kv.values.outgoing_value import IncompleteValue, OutgoingValue

log = logging.getLogger("vllm.ragcache")

_LONGEST_COPY_S = 60.0
"""How long to wait for the copies of a pass that has ended."""


class StagedValue(OutgoingValue):
    """A value that layers are copied to, and that goes out meanwhile. Safe for several threads.

    value: [num_layers, 2, T, num_kv_heads, head_dim], contiguous, CPU.
    """

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__(native_bytes(value))
        self.value = value
        self._changed = threading.Condition()
        self._sums: dict[int, int] = {}
        self._cost_s: float | None = None
        self._given_up = False

    def wait_for_parts(self, done: int, deadline: float) -> Sequence[int]:
        """See OutgoingValue."""
        with self._changed:
            self._wait(deadline, done)
            end = done
            while end in self._sums:
                end += 1
            return [self._sums[layer] for layer in range(done, end)]

    def wait_until_final(self, deadline: float) -> float:
        """See OutgoingValue."""
        with self._changed:
            self._wait(deadline, None)
            assert self._cost_s is not None
            return self._cost_s

    def whole(self) -> torch.Tensor | None:
        """The value, when all layers have been copied; None if that does not happen."""
        try:
            for layer in range(len(self.value)):
                with self._changed:
                    self._wait(time.monotonic() + _LONGEST_COPY_S, layer)
        except IncompleteValue:
            return None
        return self.value

    def add(self, layer: int, checksum: int) -> None:
        """A layer has been copied."""
        with self._changed:
            self._sums[layer] = checksum
            self._changed.notify_all()

    def finish(self, cost_s: float) -> None:
        """The pass has ended well: what was copied is right, or will be."""
        with self._changed:
            self._cost_s = cost_s
            self._changed.notify_all()

    def give_up(self) -> None:
        """What has not come will not."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def _wait(self, deadline: float, layer: int | None) -> None:
        """Wait for a layer, or for the end of the pass. Raises IncompleteValue."""

        def is_complete() -> bool:
            return self._cost_s is not None if layer is None else layer in self._sums

        left_s = max(0.0, deadline - time.monotonic())
        self._changed.wait_for(lambda: is_complete() or self._given_up, left_s)
        if not is_complete():
            why = "it was given up" if self._given_up else "it was not computed in time"
            raise IncompleteValue(f"a value did not become whole: {why}")


class LayerStaging:
    """Values of the forward pass that runs. Called on the worker's main thread."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._pool = unpinned_pool(1, "ragcache-stage")
        self._filling: dict[VariantKey, tuple[SaveJob, StagedValue, set[int]]] = {}
        self._begun: weakref.WeakSet[StagedValue] = weakref.WeakSet()
        self._broken = False

    def begin(self, job: SaveJob) -> StagedValue:
        """The pass that begins completes what a job is to save, which no other of its jobs does."""
        filling = StagedValue(self._cache.empty(job.span.end - job.span.start))
        self._filling[job.span.variant] = job, filling, set()
        self._begun.add(filling)
        return filling

    def add(self, layer: int) -> None:
        """A layer has written its KV. Outside of a pass that was begun this does nothing."""
        if self._broken:
            return
        try:
            for job, filling, copied in self._filling.values():
                self._copy(job, filling, layer)
                copied.add(layer)
        except Exception:
            log.exception("layers are copied out after the pass")
            self._broken = True

    def take(self, job: SaveJob) -> StagedValue | None:
        """The value of one of the pass's jobs, once; None: not begun, or taken. To be wait_until_final.

        Layers that nobody has told of are copied now: of a pass that was replayed as one CUDA graph
        all of them are.
        """
        begun = self._filling.pop(job.span.variant, None)
        if begun is None:
            return None
        _, filling, copied = begun
        try:
            for layer in range(self._cache.num_layers):
                if layer not in copied:
                    self._copy(job, filling, layer)
        except BaseException:
            filling.give_up()
            raise
        return filling

    def end(self) -> None:
        """The pass has ended: what was not taken is given up, and what runs next is not for it."""
        for _, filling, _ in self._filling.values():
            filling.give_up()
        self._filling = {}
        self._broken = False

    def close(self) -> None:
        """Give up what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for filling in list(self._begun):
            filling.give_up()
        self._filling = {}

    def _copy(self, job: SaveJob, filling: StagedValue, layer: int) -> None:
        span, out = job.span, filling.value[layer]
        self._cache.read_layer(layer, job.blocks, span.start, span.end, out)
        self._pool.submit(_sum_up, filling, layer, self._cache.record_event())


def _sum_up(filling: StagedValue, layer: int, copied: DeviceEvent) -> None:
    """Tell a value's checksum of a layer, when that has been copied."""
    try:
        copied.wait()
        filling.add(layer, checksum(native_bytes(filling.value[layer])))
    except Exception:
        log.exception("a layer was not copied out")
        filling.give_up()
