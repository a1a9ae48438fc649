"""Tiers of an arm of ``bench/hotness.py``: memory, and a file that bypasses the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragcache_core.identity.variant import Precision, ValuePart, ValueShape
from ragcache_kv.codecs import decode_part, native_part_bytes
from ragcache_kv.values.layout import checksum

PAGE_BYTES = 65536
HUGE_PAGE_BYTES = 2 << 20
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One value as an arm holds it."""

    precision: Precision
    parts: tuple[ValuePart, ...]
    raw: Bytes

    @classmethod
    def of(cls, precision: Precision, parts: list[Bytes]) -> Encoded:
        described = tuple(ValuePart(part.nbytes, checksum(part.data)) for part in parts)
        return cls(precision, described, np.concatenate(parts))

    @property
    def num_bytes(self) -> int:
        return int(self.raw.nbytes)


def aligned(num_bytes: int) -> Bytes:
    """Allocate touched memory like a store's memory tier, in huge pages if there are any.

    A direct read is split at every jump between physical pages of its target. With small pages its
    speed depends on their addresses: on one virtual disk 0.9 to 1.4 GB/s, and 2.0 to 2.5 GB/s into
    huge pages.
    """
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    whole[start : start + num_bytes] = 0
    return whole[start : start + num_bytes]


def touch(memories: Iterable[Bytes]) -> None:
    """Touch every page, because the host of a virtual machine may reclaim idle memory."""
    for memory in memories:
        memory[:: mmap.PAGESIZE].max()


class ValueRegion:
    """Values in one file, page-aligned and read with O_DIRECT.

    If the file system has no O_DIRECT, ``drop`` removes the file from the page cache instead.
    """

    def __init__(self, path: Path, values: Mapping[int, Encoded]) -> None:
        self._offsets: dict[int, int] = {}
        with path.open("wb") as file:
            for name, value in values.items():
                self._offsets[name] = file.tell()
                file.write(value.raw.data)
                file.write(bytes(-value.num_bytes % PAGE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        self.direct = True
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            self.direct = False
            self._fd = os.open(path, os.O_RDONLY)
        self.drop()

    def drop(self) -> None:
        """Remove the file from the page cache."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def resident_share(self) -> float:
        """Return the share of the file in the page cache (mincore)."""
        return resident_share(self._fd)

    def read(self, name: int, num_bytes: int, buffer: Bytes) -> None:
        wanted = -(-num_bytes // 4096) * 4096
        read = os.preadv(self._fd, [buffer.data[:wanted]], self._offsets[name])
        if read < num_bytes:
            raise OSError(f"{read} of {num_bytes} bytes read")

    def close(self) -> None:
        os.close(self._fd)


def resident_share(fd: int) -> float:
    """Return the share of a file in the page cache."""
    size = os.fstat(fd).st_size
    with contextlib.closing(mmap.mmap(fd, size, prot=mmap.PROT_READ)) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(
            ctypes.c_void_p(view.ctypes.data),
            ctypes.c_size_t(size),
            pages.ctypes.data_as(ctypes.c_void_p),
        )
        del view
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
    return float(np.mean(pages & 1))


class Loader:
    """Loads and decodes the values of a prompt's chunks into the caller's buffers.

    Threads read values from disk; values in memory are used in their memory. The calling thread
    verifies checksums and decodes values as they arrive.
    """

    def __init__(self, shape: ValueShape, num_tokens: int, most_chunks: int, threads: int) -> None:
        self._shape = shape
        self._num_tokens = num_tokens
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="reader")
        self._spans: list[tuple[float, float, int]] = []
        self._native = native_part_bytes(shape, num_tokens)
        whole = shape.num_layers * self._native
        self.outs = [aligned(whole) for _ in range(most_chunks)]
        self._staging = [aligned(whole) for _ in range(most_chunks)]
        self._kept: dict[int, Bytes] = {}

    def keep(self, value: Encoded) -> None:
        self._kept[id(value)] = aligned(value.num_bytes)
        self._kept[id(value)][:] = value.raw

    def make_ready(self, chunks: list[int], values: Mapping[int, Encoded]) -> None:
        """Touch all memory that these loads may use, and overwrite the last results."""
        touch(self._kept[id(values[one])] for one in chunks if id(values[one]) in self._kept)
        touch(self._staging)
        for out in self.outs:
            out[:] = 0

    def load(self, chunks: list[int], values: Mapping[int, Encoded], disk: ValueRegion) -> None:
        """Fill ``outs`` with the chunks' native values, in order."""
        coming: dict[Future[None], tuple[Encoded, Bytes, Bytes]] = {}
        kept: list[tuple[Encoded, Bytes, Bytes]] = []
        for chunk, out, staging in zip(chunks, self.outs, self._staging, strict=False):
            value = values[chunk]
            if id(value) in self._kept:
                kept.append((value, self._kept[id(value)], out))
            else:
                buffer = out if value.precision.lossless else staging
                read = self._readers.submit(self._read, disk, chunk, value.num_bytes, buffer)
                coming[read] = (value, buffer, out)
        for delivery in kept:
            self._deliver(*delivery)
        for read in as_completed(coming):
            read.result()
            self._deliver(*coming[read])

    def take_rate(self) -> float | None:
        """Return and reset the rate of reads since the last call, in bytes per second."""
        if not self._spans:
            return None
        begun, ended, sizes = zip(*self._spans, strict=True)
        self._spans.clear()
        return float(sum(sizes) / (max(ended) - min(begun)))

    def close(self) -> None:
        self._readers.shutdown()

    def _read(self, disk: ValueRegion, name: int, num_bytes: int, buffer: Bytes) -> None:
        begun = time.perf_counter()
        disk.read(name, num_bytes, buffer)
        self._spans.append((begun, time.perf_counter(), num_bytes))

    def _deliver(self, value: Encoded, source: Bytes, out: Bytes) -> None:
        start = 0
        for layer, part in enumerate(value.parts):
            raw = source[start : start + part.num_bytes]
            start += part.num_bytes
            if checksum(raw.data) != part.checksum:
                raise AssertionError("a part came back damaged")
            if not value.precision.lossless:
                native = out[layer * self._native : (layer + 1) * self._native]
                decode_part(raw, self._shape, self._num_tokens, value.precision, out=native)
        if value.precision.lossless and source is not out:
            out[:] = source
