"""Write values to a request's blocks, and rotate keys that have moved, on the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragcache_engine.kv_cache.chunk_pool import concatenate_pieces, copy_value
from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.host_memory import is_needed, upload
from ragcache_engine.kv_cache.incoming_value import (
    EncodedValue,
    IncomingValue,
    LeasedSource,
    ValueSource,
)
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import LoadJob
from ragcache_kv.rotation import KeyRotation


@dataclass(frozen=True, slots=True)
class PlacedValue:
    """Prompt tokens [start, end) of a value that has arrived."""

    value: IncomingValue
    start: int
    end: int

    @property
    def source(self) -> ValueSource:
        """Where the value is."""
        assert self.value.source is not None
        return self.value.source

    def pieces(self) -> Sequence[torch.Tensor]:
        """Return the tokens in order, each [num_layers, 2, T, num_kv_heads, head_dim]."""
        first = self.value.span.start
        return self.source.pieces(self.start - first, self.end - first)


class BlockWriter:
    """Only the worker's main thread may use it, because its writes must stay in order.

    Args:
        cache: The paged cache.
        rotation: Of the model's keys; None: the worker cannot move values.
    """

    def __init__(self, cache: PagedCache, rotation: KeyRotation | None) -> None:
        self._cache = cache
        self._rotation = rotation
        self._written: list[ValueSource] = []
        self._in_use: list[tuple[DeviceEvent, list[ValueSource]]] = []

    def write(
        self, job: LoadJob, values: Sequence[PlacedValue], layers: range | None = None
    ) -> None:
        """Write values to the job's blocks.

        A GPU writes each layer of all values in one operation.

        Args:
            job: The load.
            values: Values that have arrived.
            layers: Layers to write, the last one in the last call; None: all. Each call decodes all
                layers of a value that needs it.
        """
        if not values:
            return
        layers = layers or range(self._cache.num_layers)
        if layers.stop == self._cache.num_layers:
            # A CPU has read a source at return, and a tier's is closed in any case.
            reads_later = is_needed(self._cache.device)
            self._written += [
                one.source for one in values if reads_later or isinstance(one.source, LeasedSource)
            ]
        if is_needed(self._cache.device):
            # A decoded value takes the device's memory, so only one is there at a time.
            decoded = [one for one in values if isinstance(one.source, EncodedValue)]
            stored = [one for one in values if not isinstance(one.source, EncodedValue)]
            for together in (stored, *([one] for one in decoded)):
                if together:
                    self._write_together(job, together, layers)
            return
        for one in values:
            pieces, start = one.pieces(), one.start
            if one.value.rotate_by:
                whole = concatenate_pieces(pieces, self._cache.device)
                pieces = (self._rotated(whole, one, range(self._cache.num_layers)),)
            for piece in pieces:
                stop = start + piece.shape[2]
                slots = self._cache.slots(job.blocks, start, stop)
                self._cache.write(piece[layers.start : layers.stop], slots, layers.start)
                start = stop

    def release_read_values(self) -> None:
        """Release the written sources that the device has finished reading; never waits."""
        if self._written:
            written, self._written = self._written, []
            self._in_use.append((self._cache.record_event(), written))
        while self._in_use and self._in_use[0][0].is_complete:
            for source in self._in_use.pop(0)[1]:
                if isinstance(source, LeasedSource):
                    source.close()

    def _write_together(self, job: LoadJob, values: Sequence[PlacedValue], layers: range) -> None:
        """Write to a device's memory, some layers at a time."""
        device = self._cache.device
        of_values = [self._cache.slots(job.blocks, one.start, one.end) for one in values]
        [slots] = upload([torch.cat(of_values)], device)
        pieces = [(one, piece) for one in values for piece in one.pieces()]
        for group in self._cache.staged_layers(layers, len(slots)):
            _, both, _, *head = pieces[0][1].shape
            dims, dtype = (len(group), both, len(slots), *head), pieces[0][1].dtype
            staged = torch.empty(dims, dtype=dtype, device=device)
            begin = 0
            for one, piece in pieces:
                end = begin + piece.shape[2]
                self._stage(one, piece, staged[:, :, begin:end], group)
                begin = end
            self._cache.write(staged, slots, group.start)

    def _stage(
        self, one: PlacedValue, whole: torch.Tensor, staged: torch.Tensor, layers: range
    ) -> None:
        """Copy some layers of a piece to the device, with its keys rotated."""
        piece = whole[layers.start : layers.stop]
        if not one.value.rotate_by and not piece.is_contiguous():
            copy_value(staged, piece, non_blocking=True)
            return
        if piece.is_contiguous():
            # A value that is on the device already belongs to its source.
            near = piece.to(staged.device, non_blocking=True, copy=bool(one.value.rotate_by))
        else:
            near = torch.empty(piece.shape, dtype=piece.dtype, device=staged.device)
            copy_value(near, piece, non_blocking=True)
        if one.value.rotate_by:
            near = self._rotated(near, one, layers)
        staged.copy_(near)

    def _rotated(self, value: torch.Tensor, one: PlacedValue, layers: range) -> torch.Tensor:
        assert self._rotation is not None
        return self._rotation.of_layers(layers).rotate_part(value, one.value.rotate_by)
