"""Cuts the GPU code of a shared library down to one GPU architecture.

A CUDA library embeds *fat binaries*: each has a header and then one entry for each architecture,
with machine code or PTX. The driver takes the first entry that fits. ``cut`` puts the entries for
the wanted architecture first, shortens the fat binary to them, and zeroes the rest, so that a
compressor removes it. Offsets in the library stay the same.

Layout (little endian), as cuobjdump prints it: header ``magic u32, version u16, header size u16,
size u64``; entry ``kind u16, unused u16, header size u32, size u64, ..., architecture u32`` at byte
28. Kind 1 is PTX and kind 2 machine code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_MAGIC: Final = 0xBA55ED50
_MAGIC_BYTES: Final = struct.pack("<I", _MAGIC)
_HEADER: Final = struct.Struct("<IHHQ")
_ENTRY: Final = struct.Struct("<HHIQ12xI")
_VERSION: Final = 1
_MACHINE_CODE: Final = 2
_KINDS: Final = (1, _MACHINE_CODE)
_MAX_ENTRY_HEADER: Final = 4096


@dataclass(frozen=True, slots=True)
class Cut:
    """What ``cut`` did.

    Attributes:
        fat_binaries: How many the library has.
        code_bytes: Their size before.
        kept_bytes: Their size now.
    """

    fat_binaries: int
    code_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: int
    architecture: int
    header_bytes: int
    raw: bytes


def cut(library: bytearray, architecture: int) -> Cut:
    """Cut a library in place to the machine code of one architecture (90: sm_90).

    A fat binary without machine code for it keeps the header of its smallest entry with a zeroed
    body, because the library registers each fat binary when it is loaded.

    Raises:
        ValueError: A fat binary has another layout than the known one.
    """
    count = code_bytes = kept_bytes = 0
    for start, end in _fat_binaries(library):
        entries = list(_entries(library, start + _HEADER.size, end))
        kept = b"".join(
            entry.raw
            for entry in entries
            if entry.kind == _MACHINE_CODE and entry.architecture == architecture
        )
        if not kept:
            smallest = min(entries, key=lambda entry: len(entry.raw))
            head = smallest.raw[: smallest.header_bytes]
            kept = head + bytes(len(smallest.raw) - len(head))
        _HEADER.pack_into(library, start, _MAGIC, _VERSION, _HEADER.size, len(kept))
        body = start + _HEADER.size
        library[body:end] = kept + bytes(end - body - len(kept))
        count += 1
        code_bytes += end - body
        kept_bytes += len(kept)
    return Cut(count, code_bytes, kept_bytes)


def _fat_binaries(library: bytearray) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each fat binary."""
    position = 0
    while (start := library.find(_MAGIC_BYTES, position)) >= 0:
        position = start + len(_MAGIC_BYTES)
        if start + _HEADER.size > len(library):
            return
        _, version, header_bytes, size = _HEADER.unpack_from(library, start)
        end = start + header_bytes + size
        # The same four bytes can stand elsewhere, for example in the code that reads them.
        if version == _VERSION and header_bytes == _HEADER.size and end <= len(library):
            yield start, end
            position = end


def _entries(library: bytearray, start: int, end: int) -> Iterator[_Entry]:
    while start < end:
        kind, _, header_bytes, size, architecture = _ENTRY.unpack_from(library, start)
        stop = start + header_bytes + size
        fits = _ENTRY.size <= header_bytes < _MAX_ENTRY_HEADER and stop <= end
        if kind not in _KINDS or not fits:
            raise ValueError(f"unknown entry in a fat binary at byte {start:#x}: kind {kind}")
        yield _Entry(kind, architecture, header_bytes, bytes(library[start:stop]))
        start = stop
