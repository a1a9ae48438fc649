"""The file of a backup survives any transport, or is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.documents.backup_file import BackupReader, BackupWriter
from ragcache_core.errors import InvalidInput


def file_of(parts: list[bytes]) -> bytes:
    writer = BackupWriter()
    return b"".join([*(writer.add(part) for part in parts), writer.end()])


def copy_of(file: bytes, sizes: list[int]) -> bytes:
    """Read a file in pieces of these sizes, and then the rest."""
    reader = BackupReader("file")
    copy = b""
    for size in sizes:
        copy += reader.add(file[:size])
        file = file[size:]
    copy += reader.add(file)
    reader.end()
    return copy


@given(parts=st.lists(st.binary(max_size=80)), sizes=st.lists(st.integers(0, 40)))
def test_a_copy_survives_in_pieces_of_any_size(parts: list[bytes], sizes: list[int]) -> None:
    assert copy_of(file_of(parts), sizes) == b"".join(parts)


@given(copy=st.binary(max_size=80), data=st.data())
def test_a_file_that_was_cut_off_is_refused(copy: bytes, data: st.DataObject) -> None:
    file = file_of([copy])
    length = data.draw(st.integers(0, len(file) - 1))
    with pytest.raises(InvalidInput):
        copy_of(file[:length], [])


@given(copy=st.binary(max_size=80), data=st.data())
def test_a_file_with_a_changed_byte_is_refused(copy: bytes, data: st.DataObject) -> None:
    file = bytearray(file_of([copy]))
    index = data.draw(st.integers(0, len(file) - 1))
    file[index] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidInput):
        copy_of(bytes(file), [7])
