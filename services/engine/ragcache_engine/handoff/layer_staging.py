"""Copies each layer out of the paged cache when it is computed, while the next ones are."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence

import torch
from typing_extensions import override

from ragcache_core.identity.keys import VariantKey
from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.paged_cache import PagedCache, TokenRange
from ragcache_engine.kv_cache.value_tensors import native_bytes
from ragcache_engine.protocol.messages import SaveJob
from ragcache_engine.threads import unpinned_pool
from ragcache_kv.values.layout import checksum
from ragcache_kv.values.outgoing_value import IncompleteValue, OutgoingValue

log = logging.getLogger("vllm.ragcache")

_MAX_COPY_S = 60.0
"""How long to wait for a layer's copy after its pass has ended."""


class StagedValue(OutgoingValue):
    """A value that is sent to the store while its layers are still being copied. Thread-safe.

    Args:
        value: [num_layers, 2, T, num_kv_heads, head_dim], contiguous, on the CPU.
    """

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__(native_bytes(value))
        self.value = value
        self._changed = threading.Condition()
        self._checksums: dict[int, int] = {}
        self._cost_s: float | None = None
        self._aborted = False

    @override
    def wait_for_parts(self, done: int, deadline: float) -> Sequence[int]:
        with self._changed:
            self._wait(deadline, done)
            end = done
            while end in self._checksums:
                end += 1
            return [self._checksums[layer] for layer in range(done, end)]

    @override
    def wait_until_final(self, deadline: float) -> float:
        with self._changed:
            self._wait(deadline, None)
            assert self._cost_s is not None
            return self._cost_s

    def wait_for_value(self) -> torch.Tensor | None:
        """Return the value when all its layers have been copied. None: the copy was aborted."""
        try:
            for layer in range(len(self.value)):
                with self._changed:
                    self._wait(time.monotonic() + _MAX_COPY_S, layer)
        except IncompleteValue:
            return None
        return self.value

    def add_layer(self, layer: int, checksum: int) -> None:
        """Record that a layer has been copied."""
        with self._changed:
            self._checksums[layer] = checksum
            self._changed.notify_all()

    def complete(self, cost_s: float) -> None:
        """Record that the pass has ended without an error, so that the copied layers are right."""
        with self._changed:
            self._cost_s = cost_s
            self._changed.notify_all()

    def abort(self) -> None:
        """Stop waiting for layers that have not been copied."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def _wait(self, deadline: float, layer: int | None) -> None:
        """Wait for a layer, or for the end of the pass. Raises IncompleteValue."""

        def is_there() -> bool:
            return self._cost_s is not None if layer is None else layer in self._checksums

        left_s = max(0.0, deadline - time.monotonic())
        self._changed.wait_for(lambda: is_there() or self._aborted, left_s)
        if not is_there():
            reason = "its copy was aborted" if self._aborted else "it was not computed in time"
            raise IncompleteValue(f"a value is incomplete: {reason}")


class LayerStaging:
    """The values that the running forward pass completes. For the worker's main thread."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._pool = unpinned_pool(1, "ragcache-stage")
        self._in_pass: dict[VariantKey, tuple[SaveJob, StagedValue, set[int]]] = {}
        self._all_values: weakref.WeakSet[StagedValue] = weakref.WeakSet()
        self._failed = False

    def begin(self, job: SaveJob) -> StagedValue:
        """Stage the value of a job, which the pass that begins completes."""
        staged = StagedValue(self._cache.empty(job.span.end - job.span.start))
        self._in_pass[job.span.variant] = job, staged, set()
        self._all_values.add(staged)
        return staged

    def copy_layer(self, layer: int) -> None:
        """Copy a layer whose KV the pass has written. Without staged values this does nothing."""
        if self._failed:
            return
        try:
            for job, staged, copied in self._in_pass.values():
                self._copy(job, staged, layer)
                copied.add(layer)
        except Exception:
            log.exception("layer staging: copy failed, layers are copied after the pass")
            self._failed = True

    def take(self, job: SaveJob) -> StagedValue | None:
        """Return a job's staged value, which the caller must ``complete``, or None.

        Layers without a ``copy_layer`` are copied now. A pass that ran as one CUDA graph has none.
        """
        in_pass = self._in_pass.pop(job.span.variant, None)
        if in_pass is None:
            return None
        _, staged, copied = in_pass
        try:
            for layer in range(self._cache.num_layers):
                if layer not in copied:
                    self._copy(job, staged, layer)
        except BaseException:
            staged.abort()
            raise
        return staged

    def end_pass(self) -> None:
        """Abort the values that were not taken."""
        for _, staged, _ in self._in_pass.values():
            staged.abort()
        self._in_pass = {}
        self._failed = False

    def close(self) -> None:
        """Abort all values."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for staged in list(self._all_values):
            staged.abort()
        self._in_pass = {}

    def _copy(self, job: SaveJob, staged: StagedValue, layer: int) -> None:
        tokens = TokenRange(job.blocks, job.span.start, job.span.end)
        self._cache.read_layers([tokens], [staged.value[layer : layer + 1]], layer)
        self._pool.submit(_add_checksum, staged, layer, self._cache.record_event())


def _add_checksum(staged: StagedValue, layer: int, copied: DeviceEvent) -> None:
    """Wait until a layer has been copied, and add its checksum to the value."""
    try:
        copied.wait()
        staged.add_layer(layer, checksum(native_bytes(staged.value[layer])))
    except Exception:
        log.exception("layer staging: copy failed layer=%d", layer)
        staged.abort()
