"""How values get into a request's blocks: turned where they have moved, by the model's device."""

from __future__ import annotations

import logging

from ragcache_engine.kv_cache.chunk_pool import concatenate_pieces
from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.incoming_value import IncomingValue
from ragcache_engine.kv_cache.paged_cache import PagedCache
from ragcache_engine.protocol.messages import LoadJob
from ragcache_engine.tiers.local_tiers import TierRead
from ragcache_kv.rotation import KeyRotation

log = logging.getLogger("vllm.ragcache")


class BlockWriter:
    """For the worker's main thread only: its device does one thing after the other."""

    def __init__(self, cache: PagedCache, rotation: KeyRotation | None) -> None:
        self._cache = cache
        self._rotation = rotation
        self._written: list[TierRead] = []
        self._in_use: list[tuple[DeviceEvent, list[TierRead]]] = []

    def write(
        self, job: LoadJob, arrival: IncomingValue, start: int, end: int, layers: range | None = None
    ) -> None:
        """Write prompt tokens [start, end) of an arrival's span into the job's blocks.

        layers: some, the last one in the last call; None: all. Those of a value that has moved, or
        has yet to be decoded, are turned or decoded all in each call.
        """
        layers = layers or range(self._cache.num_layers)
        span, source = arrival.span, arrival.source
        assert source is not None
        if isinstance(source, TierRead) and layers.stop == self._cache.num_layers:
            self._written.append(source)
        pieces = source.pieces(start - span.start, end - span.start)
        if arrival.turn:
            assert self._rotation is not None
            value = concatenate_pieces(pieces, self._cache.device)
            pieces = (self._rotation.rotate_part(value, arrival.turn),)
        for piece in pieces:
            stop = start + piece.shape[2]
            slots = self._cache.slots(job.blocks, start, stop)
            self._cache.write(piece[layers.start : layers.stop], slots, layers.start)
            start = stop

    def let_go(self) -> None:
        """End the reads of what was written, where the device is done with it; never waits."""
        if self._written:
            written, self._written = self._written, []
            self._in_use.append((self._cache.record_event(), written))
        while self._in_use and self._in_use[0][0].is_complete:
            for reading in self._in_use.pop(0)[1]:
                reading.close()
