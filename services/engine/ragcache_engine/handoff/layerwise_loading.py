"""Layer-wise loading: a request starts when the first layers of its load are in place.

The other layers are copied into the request's blocks during the next forward pass, each before it
is needed. A GPU copies them on a stream of its own. A CPU copies them between the layers of the
pass, since a copy takes the cores that compute. Only values that have arrived are deferred, so no
pass waits for a store. Only exact loads are deferred, because recomputation reads all layers
before its request starts.

The next pass completes all deferred layers, whichever requests it runs: vLLM may already share the
blocks with other requests. Deferred layers of a request that has ended are written before that
pass, which may write other KV into the same blocks.

Source: Cache-Craft section 3.4.2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ragcache_core.cost.linear_fit import LinearFit
from ragcache_core.cost.load_or_compute import MIN_WEIGHT, preload_depth
from ragcache_engine.kv_cache.block_writer import BlockWriter, PlacedValue
from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.incoming_value import IncomingValue
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import LoadJob

log = logging.getLogger("vllm.ragcache")


@dataclass(frozen=True, slots=True)
class _DeferredLayers:
    """Values without the layers before ``first_layer``."""

    job: LoadJob
    values: Sequence[PlacedValue]
    first_layer: int


class LayerwiseLoader:
    """Writes the first layers of a load, and the others in the next pass.

    For the worker's main thread only.

    Args:
        cache: vLLM's paged cache.
        writer: Writes values into blocks.
        depth: Returns how many layers of a job to write at once. None: by eq. 16, with times that
            are learned from writes between passes.
    """

    def __init__(
        self,
        cache: PagedCache,
        writer: BlockWriter,
        depth: Callable[[LoadJob], int] | None = None,
    ) -> None:
        self._num_layers = cache.num_layers
        self._record_event = cache.record_event
        self._writer = writer
        self._depth = depth or self._preload_depth
        self._write_times = LinearFit()  # by tokens times layers
        self._written: list[tuple[int, DeviceEvent, DeviceEvent]] = []
        self._deferred: dict[str, list[_DeferredLayers]] = {}
        # Deferred layers that the running pass completes.
        self._in_pass: dict[str, list[_DeferredLayers]] = {}
        self._copy_stream = _CopyStream(cache.device) if cache.device.type == "cuda" else None
        # State of the running pass: the layer that it needs next, and whether a write failed.
        self._next_layer = 0
        self._failed = False
        self._disabled = self._logged = False

    def write(self, job: LoadJob, values: Sequence[PlacedValue]) -> None:
        """Write of values as many layers as a pass needs at once."""
        self._observe_writes()
        may_defer = [self._may_defer(job, one.value) for one in values]
        whole = [one for one, defer in zip(values, may_defer, strict=True) if not defer]
        self._write_first(job, whole, self._num_layers)
        in_part = [one for one, defer in zip(values, may_defer, strict=True) if defer]
        if in_part:
            depth = self._depth(job)
            self._write_first(job, in_part, depth)
            if depth < self._num_layers:
                deferred = _DeferredLayers(job, in_part, depth)
                self._deferred.setdefault(job.request_id, []).append(deferred)
                self._log_once(depth)

    def _write_first(self, job: LoadJob, values: Sequence[PlacedValue], depth: int) -> None:
        """Write the first layers of values, and note how long that takes."""
        if values:
            began = self._record_event()
            self._writer.write(job, values, range(depth))
            size = sum(one.end - one.start for one in values) * depth
            self._written.append((size, began, self._record_event()))

    def write_deferred(self, request_ids: Iterable[str]) -> list[LoadJob]:
        """Write the deferred layers of these requests now. Return the jobs that failed."""
        deferred = [self._deferred.pop(request_id, []) for request_id in request_ids]
        return [job for job, written in self._complete(deferred) if not written]

    def begin_pass(self) -> bool:
        """Begin a pass, which calls ``wait_for_layer`` for each layer in turn.

        Returns:
            Whether the pass completes a load, and so takes longer than its work. Never raises.
        """
        self._next_layer, self._failed = 0, False
        self._in_pass, self._deferred = self._deferred, {}
        if self._copy_stream is not None and self._in_pass:
            try:
                with self._copy_stream.activate():
                    for layer in range(self._num_layers):
                        if self._write_layer(layer):
                            self._copy_stream.mark(layer)
            except Exception:
                log.exception("layer-wise load: write during a pass failed")
                self._failed = True
        return bool(self._in_pass)

    def wait_for_layer(self, layer: int) -> None:
        """Make sure that a layer is in place before the pass attends to it. Never raises."""
        if not self._in_pass or self._failed or self._next_layer != layer:
            return  # for example a recomputation's pass
        try:
            if self._copy_stream is None:
                self._write_layer(layer)
            else:
                self._copy_stream.wait(layer)
        except Exception:
            log.exception("layer-wise load: write failed layer=%d", layer)
            self._failed = True
        self._next_layer = layer + 1

    def end_pass(self) -> list[LoadJob]:
        """End the pass. Return the jobs that it used without some of their layers.

        Either a layer could not be written, or this vLLM does not call the connector for each
        layer. Nothing is deferred again in the second case. The missing layers are written now as
        far as possible, because vLLM may not report the bad blocks to all requests that share them.
        """
        deferred, self._in_pass = list(self._in_pass.values()), {}
        if not deferred or (self._next_layer == self._num_layers and not self._failed):
            return []
        if not self._failed:
            self._disabled = True
            log.error("layer-wise load: disabled, vLLM does not call the connector for each layer")
        if self._copy_stream is not None:
            self._copy_stream.join()
        return [job for job, _ in self._complete(deferred)]

    def _may_defer(self, job: LoadJob, value: IncomingValue) -> bool:
        """Tell whether layers may be deferred: exact, not moved, and where a device can read it."""
        if self._disabled or job.recompute is not None:
            return False
        if value.rotate_by or value.source is None:
            return False
        if self._copy_stream is None:
            return True
        # A GPU copies from memory that is not pinned synchronously, so the pass would wait.
        pieces = value.source.pieces(0, value.span.end - value.span.start)
        return all(piece.is_cuda or piece.is_pinned() for piece in pieces)

    def _complete(
        self, deferred: Iterable[list[_DeferredLayers]]
    ) -> Iterator[tuple[LoadJob, bool]]:
        """Write all deferred layers. Yield each job, and whether that succeeded."""
        for of_job in deferred:
            if not of_job:
                continue
            try:
                for layers in of_job:
                    self._write(layers, range(layers.first_layer, self._num_layers))
            except Exception:
                job = of_job[0].job
                log.exception("layer-wise load: write failed request=%s", job.request_id)
                yield job, False
            else:
                yield of_job[0].job, True

    def _write_layer(self, layer: int) -> bool:
        due = [
            deferred
            for of_job in self._in_pass.values()
            for deferred in of_job
            if deferred.first_layer <= layer
        ]
        for deferred in due:
            self._write(deferred, range(layer, layer + 1))
        return bool(due)

    def _write(self, deferred: _DeferredLayers, layers: range) -> None:
        self._writer.write(deferred.job, deferred.values, layers)

    def _preload_depth(self, job: LoadJob) -> int:
        """Return eq. 16's depth. All layers, while the times to write or compute are unknown."""
        if job.compute_s is None or self._write_times.weight < MIN_WEIGHT:
            return self._num_layers
        load_s = self._write_times.predict((job.end - job.first) * self._num_layers)
        return preload_depth(self._num_layers, job.compute_s, load_s)

    def _log_once(self, depth: int) -> None:
        if not self._logged:
            self._logged = True
            log.info(
                "layer-wise load: a request starts early layers=%d of=%d", depth, self._num_layers
            )

    def _observe_writes(self) -> None:
        while self._written and self._written[0][2].is_complete:
            size, began, ended = self._written.pop(0)
            self._write_times.observe(size, ended.seconds_since(began))


class _CopyStream:
    """A CUDA stream for copies, next to the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: dict[int, torch.cuda.Event] = {}

    def activate(self) -> torch.cuda.StreamContext:
        """Return a context whose copies run in parallel with the next pass."""
        # Earlier passes may still use the same blocks.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._copied = {}
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Make the computing stream wait for all copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def mark(self, layer: int) -> None:
        """Record that the copies submitted so far include all of a layer."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._copied[layer] = event

    def wait(self, layer: int) -> None:
        """Make the computing stream wait for a layer's copies."""
        event = self._copied.get(layer)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
