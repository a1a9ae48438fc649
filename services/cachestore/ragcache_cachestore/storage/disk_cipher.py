"""Encryption of the values on disk: AES-256-GCM, with a key of its own for each value.

The key of a value follows from one of the store's keys and a random salt, so no pair of key and
nonce is used twice, however many values a store writes. The name of the variant is authenticated
with its bytes, so no value can take the place of another one.

Source: NIST SP 800-38D (GCM). RFC 5869 (HKDF).
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ragcache_wire.watched.key_lines import DiskKeys

SLICE_BYTES: Final = 1 << 20
"""Bytes that one call encrypts. They stay in the processor's cache until they are written."""

_KEY_ID_BYTES: Final = 8
_SALT_BYTES: Final = 32
_TAG_BYTES: Final = 16
_AES_KEY_BYTES: Final = 32
_NONCE: Final = bytes(12)
"""Each key encrypts one value."""
_KEY_ID: Final = b"ragcache-disk-key-id-1"
_VALUE_KEY: Final = b"ragcache-disk-value-1"


@dataclass(frozen=True, slots=True)
class EncryptionParams:
    """With what a value was encrypted. None of it is secret.

    Attributes:
        key_id: Names the store's key. It tells nothing of the key.
        salt: Random bytes of the value.
        tag: Authenticates the value and the name of its variant.
    """

    key_id: bytes
    salt: bytes
    tag: bytes

    def to_bytes(self) -> bytes:
        """Encode it in PARAMS_BYTES."""
        return self.key_id + self.salt + self.tag

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Decode PARAMS_BYTES."""
        rest = raw[_KEY_ID_BYTES:]
        return cls(raw[:_KEY_ID_BYTES], rest[:_SALT_BYTES], rest[_SALT_BYTES:])


PARAMS_BYTES: Final = _KEY_ID_BYTES + _SALT_BYTES + _TAG_BYTES


class ValueEncryption:
    """Encrypts one value, piece by piece."""

    def __init__(self, secret: bytes, name: bytes) -> None:
        self._key_id = _key_id(secret)
        self._salt = os.urandom(_SALT_BYTES)
        self._encryptor = _cipher(secret, self._salt, GCM(_NONCE)).encryptor()
        self._encryptor.authenticate_additional_data(name)

    def encrypt(self, piece: memoryview, target: memoryview) -> None:
        """Encrypt the next bytes into a target of the same length."""
        self._encryptor.update_into(piece, target)

    def end(self) -> EncryptionParams:
        """End the value. Return what decrypts it, beside the key."""
        self._encryptor.finalize()
        return EncryptionParams(self._key_id, self._salt, self._encryptor.tag)


class DiskCipher:
    """Encrypts values with the first key of a file, and decrypts those of each key in it.

    Args:
        keys: The file is read again when it changes.
    """

    def __init__(self, keys: DiskKeys) -> None:
        self._keys = keys

    def encryption(self, name: bytes) -> ValueEncryption:
        """Begin to encrypt the value of a variant with this name."""
        return ValueEncryption(self._keys.current()[0], name)

    def has_key_of(self, params: EncryptionParams) -> bool:
        """Whether the file has the key of a value."""
        return self._secret(params) is not None

    def decrypt(self, name: bytes, params: EncryptionParams, views: Sequence[memoryview]) -> bool:
        """Decrypt a value in place.

        Returns False if the file lacks its key, or if the value or its name is another one than
        was encrypted. The content of views is then undefined, and must not be used.
        """
        secret = self._secret(params)
        if secret is None:
            return False
        try:
            decryptor = _cipher(secret, params.salt, GCM(_NONCE, params.tag)).decryptor()
            decryptor.authenticate_additional_data(name)
            for piece in slices(views):
                decryptor.update_into(piece, piece)
            decryptor.finalize()
        except (InvalidTag, ValueError):  # ValueError: no store has made params
            return False
        return True

    def _secret(self, params: EncryptionParams) -> bytes | None:
        return next((one for one in self._keys.current() if _key_id(one) == params.key_id), None)


def slices(views: Sequence[memoryview]) -> list[memoryview]:
    """Return views in pieces of at most SLICE_BYTES."""
    return [
        view[start : start + SLICE_BYTES]
        for view in views
        for start in range(0, len(view), SLICE_BYTES)
    ]


def _key_id(secret: bytes) -> bytes:
    return hmac.new(secret, _KEY_ID, hashlib.sha256).digest()[:_KEY_ID_BYTES]


def _cipher(secret: bytes, salt: bytes, mode: GCM) -> Cipher[GCM]:
    derived = HKDF(SHA256(), length=_AES_KEY_BYTES, salt=salt, info=_VALUE_KEY).derive(secret)
    return Cipher(AES(derived), mode)
