"""What a client gets of a store: values in the caller's memory, whole or layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import Miss, Tier, ValuePart, ValueShape, VariantInfo
from ragcache_kv.values.conversions import from_miss, from_value_header
from ragcache_wire.v1 import cachestore_pb2 as pb

Allocate = Callable[[VariantInfo], memoryview]
"""Gives the memory that a value is to land in: writable, contiguous, at least info.num_bytes."""


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value as it came from a store. value: its info.num_bytes bytes, in the caller's memory."""

    info: VariantInfo
    parts: tuple[ValuePart, ...]
    shape: ValueShape | None
    value_format: int
    value: memoryview
    tier: Tier

    def part(self, layer: int) -> memoryview:
        """The bytes of one part; none beyond the last."""
        if layer >= len(self.parts):
            return self.value[:0]
        start = self.start_of(layer)
        return self.value[start : start + self.parts[layer].num_bytes]

    def start_of(self, layer: int) -> int:
        """Where in the value a part begins."""
        return sum([part.num_bytes for part in self.parts[:layer]])


ValueOrMiss = StoredValue | Miss


class LayeredValues(Iterator[tuple[int, list[memoryview | Miss]]]):
    """Values layer by layer, in the order an engine computes: (layer, that part of each value).

    values: what was asked for, in order; the memory of each is filled while this goes on. A part is
    verified when it is given. A value one part of which is corrupt is a miss from that layer on;
    one with fewer parts than others gives empty views after its last.
    """

    def __init__(
        self, values: list[ValueOrMiss], layers: Iterator[list[memoryview | Miss]]
    ) -> None:
        self.values = values
        self._layers = enumerate(layers)

    def __next__(self) -> tuple[int, list[memoryview | Miss]]:
        return next(self._layers)


def new_buffer(info: VariantInfo) -> memoryview:
    """New memory for a value; nothing writes zeros to it first."""
    return np.empty(info.num_bytes, np.uint8).data


def allocate_value(header: pb.GetHeader, allocate: Allocate | None) -> ValueOrMiss:
    """What header says, with memory for the value that follows.

    Raises InvalidInput if header makes no sense, or if allocate gives too little.
    """
    miss = from_miss(header.miss)
    if miss is not None:
        return miss
    info, parts, shape, value_format, tier = _described(header.SerializeToString())
    return StoredValue(info, parts, shape, value_format, allocate_buffer(info, allocate), tier)


def allocate_buffer(info: VariantInfo, allocate: Allocate | None) -> memoryview:
    """Memory for a value, of its size. Raises InvalidInput if allocate gives too little."""
    target = (allocate or new_buffer)(info)
    if target.ndim != 1 or target.itemsize != 1 or target.format != "B":
        target = target.cast("B")
    if len(target) < info.num_bytes or target.readonly:
        raise InvalidInput(
            "allocate",
            f"gave {len(target)} bytes{' to be read only' * target.readonly}",
            f"give {info.num_bytes} that may be written to",
        )
    return target[: info.num_bytes]


@lru_cache(maxsize=1024)
def _described(
    header: bytes,
) -> tuple[VariantInfo, tuple[ValuePart, ...], ValueShape | None, int, Tier]:
    # What is asked for again is mostly what was asked for before; reading it anew takes longer.
    return from_value_header("header", pb.GetHeader.FromString(header))


def num_layers(values: Sequence[ValueOrMiss]) -> int:
    """Parts of the value with the most."""
    return max((len(v.parts) for v in values if isinstance(v, StoredValue)), default=0)
