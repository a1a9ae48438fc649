"""Cutting the GPU code of a library keeps one architecture, and all offsets."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.device.fat_binary import cut

PTX, MACHINE_CODE = 1, 2
HEADER_BYTES, ENTRY_BYTES = 16, 64


def entry(kind: int, architecture: int, body: bytes) -> bytes:
    head = struct.pack("<HHIQ12xI", kind, 0, ENTRY_BYTES, len(body), architecture)
    return head.ljust(ENTRY_BYTES, b"\xee") + body


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, HEADER_BYTES, len(body)) + body


def test_only_the_code_of_the_architecture_is_left_and_comes_first() -> None:
    wanted = entry(MACHINE_CODE, 90, b"hopper")
    others = entry(MACHINE_CODE, 80, b"ampere!!"), entry(PTX, 90, b"text of 90")
    library = bytearray(b"before" + fat_binary(others[0], wanted, others[1]) + b"after")
    size = len(library)
    done = cut(library, 90)
    start = len(b"before") + HEADER_BYTES
    assert library[start : start + len(wanted)] == wanted
    assert not any(library[start + len(wanted) : -len(b"after")])
    assert (library[:6], library[-5:], len(library)) == (b"before", b"after", size)
    assert struct.unpack_from("<Q", library, len(b"before") + 8) == (len(wanted),)
    assert (done.fat_binaries, done.kept_bytes) == (1, len(wanted))
    assert done.code_bytes == sum(map(len, (wanted, *others)))


def test_without_code_of_the_architecture_a_header_without_code_is_left() -> None:
    small, large = entry(MACHINE_CODE, 80, b"xx"), entry(MACHINE_CODE, 100, b"y" * 50)
    library = bytearray(fat_binary(large, small))
    cut(library, 90)
    assert library[HEADER_BYTES : HEADER_BYTES + ENTRY_BYTES] == small[:ENTRY_BYTES]
    assert not any(library[HEADER_BYTES + ENTRY_BYTES :])


def test_the_same_four_bytes_elsewhere_are_no_fat_binary() -> None:
    library = bytearray(b"\x50\xed\x55\xba" + b"no header" + b"\x50\xed\x55\xba")
    same = bytes(library)
    assert cut(library, 90).fat_binaries == 0
    assert library == same


def test_an_unknown_layout_is_refused() -> None:
    library = bytearray(fat_binary(entry(7, 90, b"what is this")))
    with pytest.raises(ValueError, match="kind 7"):
        cut(library, 90)


ENTRIES = st.lists(
    st.tuples(st.sampled_from((PTX, MACHINE_CODE)), st.sampled_from((75, 80, 90)), st.binary()),
    min_size=1,
    max_size=5,
)


@given(st.lists(ENTRIES, max_size=4))
def test_a_second_cut_changes_nothing(binaries: list[list[tuple[int, int, bytes]]]) -> None:
    made = (fat_binary(*(entry(*one) for one in entries)) for entries in binaries)
    library = bytearray(b"\x00" * 8 + b"padding".join(made))
    size = len(library)
    assert cut(library, 90).fat_binaries == len(binaries)
    once = bytes(library)
    cut(library, 90)
    assert library == once
    assert len(library) == size
