"""Layer-wise loading: a request is taken up when its first layers are there (Cache-Craft §3.4.2).

The others are copied into its blocks while the next pass computes, each before it is needed: on a
GPU by a stream of their own, on a CPU, where a copy takes the cores that compute, in between. Only
values that have come are put off, so that no pass waits for a store, and only of loads that are
exact: what is mended is looked at in whole before its request is taken up.

Whatever pass comes next completes all that was put off, as vLLM may by then have let other requests
share the blocks. What belongs to a request that has ended is written before that pass, which may
write something else into the same blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ragcache_core.blend.preload_depth import preload_depth
from ragcache_core.cost.linear_fit import LinearFit
from ragcache_core.cost.load_or_compute import MIN_WEIGHT
from ragcache_engine.kv_cache.block_writer import BlockWriter
from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.incoming_value import IncomingValue
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import LoadJob

log = logging.getLogger("vllm.ragcache")


@dataclass(frozen=True, slots=True)
class _Rest:
    """Prompt tokens [start, end) of an arrival, of which the layers from ``first`` on are due."""

    job: LoadJob
    arrival: IncomingValue
    start: int
    end: int
    first: int


class LayerwiseLoader:
    """For the worker's main thread only. depth: L_p for a job, by default of eq. 16.

    What writing takes is learned from what is written between passes.
    """

    def __init__(
        self,
        cache: PagedCache,
        writer: BlockWriter,
        depth: Callable[[LoadJob], int] | None = None,
    ) -> None:
        self._num_layers = cache.num_layers
        self._moment = cache.record_event
        self._writer = writer
        self._depth = depth or self._preload_depth
        self._writing = LinearFit()  # by tokens times layers
        self._written: list[tuple[int, DeviceEvent, DeviceEvent]] = []
        self._rests: dict[str, list[_Rest]] = {}
        self._in_pass: dict[str, list[_Rest]] = {}  # those that the pass under way completes
        self._side = _SideStream(cache.device) if cache.device.type == "cuda" else None
        self._next = 0  # layer that the pass under way has to ask for next
        self._failed = False  # a layer of it could not be written
        self._is_off = self._told = False

    def write(self, job: LoadJob, arrival: IncomingValue, start: int, end: int) -> None:
        """Write prompt tokens [start, end) of an arrival: as many layers as must be there."""
        self._learn()
        depth = self._num_layers
        if self._may_wait(job, arrival):
            depth = self._depth(job)
        began = self._moment()
        self._writer.write(job, arrival, start, end, range(depth))
        self._written.append(((end - start) * depth, began, self._moment()))
        if depth < self._num_layers:
            rest = _Rest(job, arrival, start, end, depth)
            self._rests.setdefault(job.request_id, []).append(rest)
            self._tell(depth)

    def settle(self, request_ids: Iterable[str]) -> list[LoadJob]:
        """Write what was put off of these requests now. Returns the jobs that this failed for."""
        rests = [self._rests.pop(request_id, []) for request_id in request_ids]
        return [job for job, written in self._complete(rests) if not written]

    def begin_pass(self) -> bool:
        """A pass begins that ``layer_needed`` is called in, for each layer in turn.

        Returns whether it completes anything, so that it takes longer than its work. Never raises.
        """
        self._next, self._failed = 0, False
        self._in_pass, self._rests = self._rests, {}
        if self._side is not None and self._in_pass:
            try:
                with self._side.copying():
                    for layer in range(self._num_layers):
                        if self._write_layer(layer):
                            self._side.mark(layer)
            except Exception:
                log.exception("layers could not be written beside a pass")
                self._failed = True
        return bool(self._in_pass)

    def layer_needed(self, layer: int) -> None:
        """A layer's attention comes next in the pass. Never raises."""
        if not self._in_pass or self._failed or self._next != layer:
            return  # a pass of our own, say
        try:
            if self._side is None:
                self._write_layer(layer)
            else:
                self._side.wait(layer)
        except Exception:
            log.exception("a layer could not be written")
            self._failed = True
        self._next = layer + 1

    def end_pass(self) -> list[LoadJob]:
        """The pass has ended. Returns the jobs that it has computed without some layers of.

        Either one could not be written, or this vLLM does not call the connector for each layer,
        and then nothing is put off again. What can be written of them is written now: not every
        request that has the blocks need hear that they were bad.
        """
        rests, self._in_pass = list(self._in_pass.values()), {}
        if not rests or (self._next == self._num_layers and not self._failed):
            return []
        if not self._failed:
            self._is_off = True
            log.error("vLLM does not ask for loads by layer: they end before requests run again")
        if self._side is not None:
            self._side.join()
        return [job for job, _ in self._complete(rests)]

    def _may_wait(self, job: LoadJob, arrival: IncomingValue) -> bool:
        """Whether layers may be put off: exact, in its place, and where a device can fetch it."""
        if self._is_off or job.recompute is not None or arrival.turn or arrival.source is None:
            return False
        if self._side is None:
            return True
        # From memory that is not pinned a GPU is sent one copy after another, and the pass waits.
        pieces = arrival.source.pieces(0, arrival.span.end - arrival.span.start)
        return all(piece.is_cuda or piece.is_pinned() for piece in pieces)

    def _complete(self, rests: Iterable[list[_Rest]]) -> Iterator[tuple[LoadJob, bool]]:
        """Write all layers that are due; of each job, whether they could be."""
        for of_job in rests:
            if not of_job:
                continue
            try:
                for rest in of_job:
                    self._write(rest, range(rest.first, self._num_layers))
            except Exception:
                log.exception("loaded KV could not be written")
                yield of_job[0].job, False
            else:
                yield of_job[0].job, True

    def _write_layer(self, layer: int) -> bool:
        due = [rest for rests in self._in_pass.values() for rest in rests if rest.first <= layer]
        for rest in due:
            self._write(rest, range(layer, layer + 1))
        return bool(due)

    def _write(self, rest: _Rest, layers: range) -> None:
        self._writer.write(rest.job, rest.arrival, rest.start, rest.end, layers)

    def _preload_depth(self, job: LoadJob) -> int:
        """Eq. 16; all layers where it is not known yet what writing and computing take."""
        if job.compute_s is None or self._writing.weight < MIN_WEIGHT:
            return self._num_layers
        load_s = self._writing.predict((job.end - job.first) * self._num_layers)
        return preload_depth(self._num_layers, job.compute_s, load_s)

    def _tell(self, depth: int) -> None:
        if not self._told:
            self._told = True
            log.info("a request is taken up with %d of %d layers in place", depth, self._num_layers)

    def _learn(self) -> None:
        while self._written and self._written[0][2].is_complete:
            size, began, ended = self._written.pop(0)
            self._writing.observe(size, ended.seconds_since(began))


class _SideStream:
    """Copies beside the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready: dict[int, torch.cuda.Event] = {}

    def copying(self) -> torch.cuda.StreamContext:
        """What is told to the device within is done beside the pass that is told to it next."""
        # Not ahead of what the passes before still do with the same blocks.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._ready = {}
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """What is told to the computing stream from now on comes after all copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def mark(self, layer: int) -> None:
        """All that was told until now is what this layer needs."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._ready[layer] = event

    def wait(self, layer: int) -> None:
        """What is told to the computing stream from now on comes after the layer's copies."""
        event = self._ready.get(layer)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
