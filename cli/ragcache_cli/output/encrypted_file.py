"""A file that is encrypted and authenticated with a key: a head, a salt, and encrypted chunks.

Each chunk has a tag over its bytes, its number and whether it is the last one. So a file that was
changed, cut off or put together from others is refused. Each file has a key of its own, made of the
given key and a random salt, so no nonce is used twice.

Source: Hoang, Reyhanitabar, Rogaway, Vizár, Online Authenticated-Encryption (2015), section 7
(STREAM). RFC 5869 (HKDF).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ragcache_core.errors import InvalidInput

HEAD: Final = b"ragcache-encrypted-backup 1\n"
_SALT_BYTES: Final = 32
_CHUNK_BYTES: Final = 1 << 20
_TAG_BYTES: Final = 16
MIN_KEY_CHARS: Final = 32
_FIX: Final = "make one with `openssl rand -hex 32`"


def read_key(path: Path) -> bytes:
    """Return the key of a file, without white space around it.

    Raises:
        InvalidInput: The file cannot be read, or is short.
    """
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise InvalidInput("--key", f"{path} cannot be read: {error.strerror}", _FIX) from error
    if len(key) < MIN_KEY_CHARS:
        raise InvalidInput("--key", f"{path} has less than {MIN_KEY_CHARS} characters", _FIX)
    return key


def is_encrypted(path: Path) -> bool:
    """Whether a file begins as an encrypted one. Raises OSError."""
    with path.open("rb") as opened:
        return opened.read(len(HEAD)) == HEAD


class BackupEncryption:
    """Encrypts a file in pieces. Every byte that it returns is written in order."""

    def __init__(self, key: bytes) -> None:
        salt = secrets.token_bytes(_SALT_BYTES)
        self._cipher = _cipher(key, salt)
        self._number = 0
        self._head = HEAD + salt
        self._held = b""

    def add(self, piece: bytes) -> bytes:
        """Return the next bytes of the encrypted file."""
        self._held += piece
        encrypted, self._head = self._head, b""
        while len(self._held) > _CHUNK_BYTES:
            encrypted += self._encrypted(self._held[:_CHUNK_BYTES], is_last=False)
            self._held = self._held[_CHUNK_BYTES:]
        return encrypted

    def end(self) -> bytes:
        """Return the last bytes of the encrypted file."""
        return self._head + self._encrypted(self._held, is_last=True)

    def _encrypted(self, chunk: bytes, *, is_last: bool) -> bytes:
        nonce = _nonce(self._number, is_last=is_last)
        self._number += 1
        return self._cipher.encrypt(nonce, chunk, HEAD)


def decrypted_pieces(file: BinaryIO, key: bytes) -> Iterator[bytes]:
    """Yield the content of an encrypted file.

    Only the end of the iteration says that the file is complete.

    Raises:
        InvalidInput: The file was encrypted with another key, was changed, or is cut off.
    """
    head = file.read(len(HEAD) + _SALT_BYTES)
    cipher = _cipher(key, head[len(HEAD) :])
    chunk = file.read(_CHUNK_BYTES + _TAG_BYTES)
    number = 0
    while True:
        following = file.read(_CHUNK_BYTES + _TAG_BYTES)
        try:
            yield cipher.decrypt(_nonce(number, is_last=not following), chunk, head[: len(HEAD)])
        except (InvalidTag, ValueError) as error:
            problem = "was encrypted with another key, changed, or cut off"
            raise InvalidInput("FILE", problem, "give its key, or use another backup") from error
        if not following:
            return
        chunk, number = following, number + 1


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    derived = HKDF(SHA256(), length=32, salt=salt, info=HEAD).derive(key)
    return AESGCM(derived)


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])
