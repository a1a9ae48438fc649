"""Write values to a request's blocks, and rotate keys that have moved, on the model's device."""

from __future__ import annotations

import logging

from ragcache_engine.kv_cache.chunk_pool import concatenate_pieces
from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.incoming_value import IncomingValue, LeasedSource
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import LoadJob
from ragcache_kv.rotation import KeyRotation

log = logging.getLogger("vllm.ragcache")


class BlockWriter:
    """Only the worker's main thread may use it, because its writes must stay in order.

    Args:
        cache: The paged cache.
        rotation: Of the model's keys; None: the worker cannot move values.
    """

    def __init__(self, cache: PagedCache, rotation: KeyRotation | None) -> None:
        self._cache = cache
        self._rotation = rotation
        self._written: list[LeasedSource] = []
        self._in_use: list[tuple[DeviceEvent, list[LeasedSource]]] = []

    def write(
        self, job: LoadJob, value: IncomingValue, start: int, end: int, layers: range | None = None
    ) -> None:
        """Write prompt tokens [start, end) of a span's value to the job's blocks.

        Args:
            job: The load.
            value: A value that has arrived.
            start: First prompt position.
            end: Position after the last one.
            layers: Layers to write, the last one in the last call; None: all. Each call rotates
                or decodes all layers of a value that needs it.
        """
        layers = layers or range(self._cache.num_layers)
        span, source = value.span, value.source
        assert source is not None
        if isinstance(source, LeasedSource) and layers.stop == self._cache.num_layers:
            self._written.append(source)
        pieces = source.pieces(start - span.start, end - span.start)
        if value.rotate_by:
            assert self._rotation is not None
            whole = concatenate_pieces(pieces, self._cache.device)
            pieces = (self._rotation.rotate_part(whole, value.rotate_by),)
        for piece in pieces:
            stop = start + piece.shape[2]
            slots = self._cache.slots(job.blocks, start, stop)
            self._cache.write(piece[layers.start : layers.stop], slots, layers.start)
            start = stop

    def release_read_values(self) -> None:
        """Close the written sources that the device has finished reading; never waits."""
        if self._written:
            written, self._written = self._written, []
            self._in_use.append((self._cache.record_event(), written))
        while self._in_use and self._in_use[0][0].is_complete:
            for source in self._in_use.pop(0)[1]:
                source.close()
