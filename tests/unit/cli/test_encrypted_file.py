"""Backups that are encrypted and authenticated with a key."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_cli.output import encrypted_file
from ragcache_cli.output.encrypted_file import (
    HEAD,
    BackupEncryption,
    decrypted_pieces,
    is_encrypted,
    read_key,
)
from ragcache_core.errors import InvalidInput

KEY, OTHER = b"k" * 32, b"o" * 32
CHUNK = 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encrypted_file, "_CHUNK_BYTES", CHUNK)


def encrypted(content: bytes, key: bytes = KEY, piece_bytes: int = 50) -> bytes:
    encryption = BackupEncryption(key)
    starts = range(0, len(content), piece_bytes)
    return b"".join(encryption.add(content[i : i + piece_bytes]) for i in starts) + encryption.end()


def opened(file: bytes, key: bytes = KEY) -> bytes:
    return b"".join(decrypted_pieces(io.BytesIO(file), key))


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 1000])
def test_a_encrypted_file_is_opened_with_its_key(num_bytes: int) -> None:
    content = bytes(i % 251 for i in range(num_bytes))
    for piece_bytes in (1, CHUNK, 5 * CHUNK):
        file = encrypted(content, piece_bytes=piece_bytes)
        assert opened(file) == content
        with pytest.raises(InvalidInput, match="another key"):
            opened(file, OTHER)


def test_no_two_files_are_alike_and_none_shows_its_content() -> None:
    first, second = encrypted(b"secret " * 100), encrypted(b"secret " * 100)
    assert first[len(HEAD) :] != second[len(HEAD) :]
    assert b"secret" not in first


@settings(deadline=None)
@given(at=st.integers(0, 4 * CHUNK), bit=st.integers(0, 7))
def test_a_changed_bit_is_found(at: int, bit: int) -> None:
    file = bytearray(encrypted(bytes(4 * CHUNK)))
    file[at] ^= 1 << bit
    with pytest.raises(InvalidInput, match="changed"):
        opened(bytes(file))


def test_chunks_cannot_be_cut_off_dropped_swapped_or_added() -> None:
    file = encrypted(bytes(4 * CHUNK))
    start, size = len(HEAD) + 32, CHUNK + 16
    head, chunks = file[:start], [file[i : i + size] for i in range(start, len(file), size)]
    assert len(chunks) == 4
    first, second, third, last = chunks
    for wrong in (
        [],
        [first, second, third],
        [first, third, last],
        [second, first, third, last],
        [first, second, third, last, last],
        [last],
    ):
        with pytest.raises(InvalidInput, match="changed"):
            opened(head + b"".join(wrong))


def test_a_key_file_is_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_key(path)
    path.write_text("short\n")
    with pytest.raises(InvalidInput, match="less than 32 characters; make one with `openssl"):
        read_key(path)
    path.write_text("a" * 64 + "\n")
    assert read_key(path) == b"a" * 64
    assert not is_encrypted(path)
