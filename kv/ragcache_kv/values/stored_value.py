"""Values that a client reads from a store into the caller's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.variant import (
    Miss,
    Tier,
    ValueHeader,
    ValuePart,
    ValueShape,
    VariantInfo,
)
from ragcache_kv.values.conversions import from_miss, from_value_header
from ragcache_wire.v1 import cachestore_pb2 as pb

Allocate = Callable[[VariantInfo], memoryview]
"""Returns memory for a value: writable, contiguous, at least info.num_bytes."""


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value from a store.

    Attributes:
        value: Its info.num_bytes bytes in the caller's memory.
        tag: As the store told it. A client with the platform's key has checked it.
    """

    info: VariantInfo
    parts: tuple[ValuePart, ...]
    shape: ValueShape | None
    value_format: int
    value: memoryview
    tier: Tier
    tag: bytes = b""

    def part(self, layer: int) -> memoryview:
        """Return the bytes of one part; none after the last one."""
        if layer >= len(self.parts):
            return self.value[:0]
        start = sum([part.num_bytes for part in self.parts[:layer]])
        return self.value[start : start + self.parts[layer].num_bytes]


ValueOrMiss = StoredValue | Miss


def new_buffer(info: VariantInfo) -> memoryview:
    """Return new memory for a value, without writing zeros to it."""
    return np.empty(info.num_bytes, np.uint8).data


def allocate_value(header: pb.GetHeader, allocate: Allocate | None) -> ValueOrMiss:
    """Read a header, and allocate memory for the value that follows.

    Raises:
        InvalidInput: The header is invalid, or allocate returned too little memory.
    """
    miss = from_miss(header.miss)
    if miss is not None:
        return miss
    told = _read_header(header.SerializeToString())
    return value_of_header(told, allocate)


def value_of_header(told: ValueHeader, allocate: Allocate | None) -> StoredValue:
    """Allocate memory for a value. Raises InvalidInput if allocate returns too little."""
    buffer = allocate_buffer(told.info, allocate)
    return StoredValue(
        told.info, told.parts, told.shape, told.value_format, buffer, told.tier, told.tag
    )


def allocate_buffer(info: VariantInfo, allocate: Allocate | None) -> memoryview:
    """Allocate memory of a value's size. Raises InvalidInput if allocate returns too little."""
    target = (allocate or new_buffer)(info)
    if target.ndim != 1 or target.itemsize != 1 or target.format != "B":
        target = target.cast("B")
    if len(target) < info.num_bytes or target.readonly:
        raise InvalidInput(
            "allocate",
            f"returned {len(target)}{' read-only' * target.readonly} bytes",
            f"return {info.num_bytes} writable bytes",
        )
    return target[: info.num_bytes]


@lru_cache(maxsize=1024)
def _read_header(header: bytes) -> ValueHeader:
    # Most requests repeat earlier ones, and the cache is faster than parsing.
    return from_value_header("header", pb.GetHeader.FromString(header))
