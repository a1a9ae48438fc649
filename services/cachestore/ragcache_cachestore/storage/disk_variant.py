"""The metadata of one variant on disk, as RocksDB stores it: everything but the value."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from ragcache_cachestore.storage.disk_cipher import PARAMS_BYTES, EncryptionParams
from ragcache_core.identity.keys import KEY_BYTES, VariantKey
from ragcache_core.identity.variant import (
    Influence,
    Origin,
    Precision,
    Provenance,
    ValuePart,
    ValueShape,
    VariantInfo,
)
from ragcache_core.storage.extents import Extent

VERSION = 6
"""Version of the data layout, and first byte of the metadata.

A store does not start on a folder with another version (``data_dir``).
"""

_HEAD = struct.Struct("<BBQQIIQIddIHII")
_SHAPE = struct.Struct("<III")
_PAIR = struct.Struct("<QQ")
_LENGTH = struct.Struct("<H")

_EXACT, _SHAPED, _PARENTED, _RIGHTS, _WRITTEN, _TAGGED, _ENCRYPTED = 1, 2, 4, 8, 16, 32, 64


@dataclass(frozen=True, slots=True)
class DiskVariant:
    """A variant on disk without its value.

    Attributes:
        extents: Where the value is in the file of values.
        parts: The layers of the value, one after another.
        value_format: Version of the value's layout (``ragcache_kv.values.layout``).
        delete_sequence: The store's last delete when the variant was put.
        put_order: Ascends with every put.
        tag: As the client put it (``ragcache_kv.values.tags``).
        encryption: Of an encrypted value. None: the value is plain.
    """

    extents: tuple[Extent, ...]
    info: VariantInfo
    shape: ValueShape | None
    parts: tuple[ValuePart, ...]
    origin: Origin
    value_format: int
    delete_sequence: int
    put_order: int
    tag: bytes = b""
    encryption: EncryptionParams | None = None

    def to_bytes(self) -> bytes:
        """Encode: fixed fields, lists, then texts with their lengths."""
        influence = self.origin.influence
        flags = (
            _EXACT * self.info.provenance.exact
            | _SHAPED * (self.shape is not None)
            | _PARENTED * (self.origin.parent is not None)
            | _RIGHTS * bool(influence.rights)
            | _WRITTEN * bool(influence.writer)
            | _TAGGED * bool(self.tag)
            | _ENCRYPTED * (self.encryption is not None)
        )
        out = [
            _HEAD.pack(
                VERSION,
                flags,
                self.put_order,
                self.delete_sequence,
                self.value_format,
                self.info.num_tokens,
                self.info.num_bytes,
                self.info.base_position,
                self.origin.cost_s,
                self.origin.token_s,
                len(self.extents),
                len(self.parts),
                len(self.origin.prefix_chunks),
                influence.num_head,
            )
        ]
        out += [_PAIR.pack(extent.offset, extent.num_bytes) for extent in self.extents]
        out += [_PAIR.pack(part.num_bytes, part.checksum) for part in self.parts]
        out += (*self.origin.prefix_chunks, influence.rights, influence.writer)
        if self.tag:
            out += [_LENGTH.pack(len(self.tag)), self.tag]
        if self.encryption is not None:
            out.append(self.encryption.to_bytes())
        if self.origin.parent is not None:
            out.append(self.origin.parent.to_bytes())
        if self.shape is not None:
            out.append(
                _SHAPE.pack(self.shape.num_layers, self.shape.num_kv_heads, self.shape.head_dim)
            )
        texts = [str(self.info.precision), self.origin.domain, self.origin.document]
        if self.shape is not None:
            texts.append(self.shape.dtype)
        for text in texts:
            raw = text.encode()
            out += [_LENGTH.pack(len(raw)), raw]
        return b"".join(out)

    @classmethod
    def from_bytes(cls, raw: bytes) -> DiskVariant:
        """Decode what to_bytes has made.

        Raises:
            ValueError: The bytes are not valid, or the sizes of info, parts and extents disagree.
        """
        reader = ByteReader(raw)
        (
            version,
            flags,
            put_order,
            delete_sequence,
            value_format,
            num_tokens,
            num_bytes,
            base_position,
            cost_s,
            token_s,
            num_extents,
            num_parts,
            num_chunks,
            num_head,
        ) = reader.unpack(_HEAD)
        if version != VERSION:
            raise ValueError(f"the metadata has version {version}, not {VERSION}")
        extents = tuple(Extent(*reader.unpack(_PAIR)) for _ in range(num_extents))
        parts = tuple(ValuePart(*reader.unpack(_PAIR)) for _ in range(num_parts))
        prefix_chunks = tuple(reader.take(KEY_BYTES) for _ in range(num_chunks))
        rights = reader.take(KEY_BYTES) if flags & _RIGHTS else b""
        writer = reader.take(KEY_BYTES) if flags & _WRITTEN else b""
        influence = Influence(rights, writer, num_head)
        tag = reader.take(*reader.unpack(_LENGTH)) if flags & _TAGGED else b""
        encryption = (
            EncryptionParams.from_bytes(reader.take(PARAMS_BYTES)) if flags & _ENCRYPTED else None
        )
        parent = VariantKey.from_bytes(reader.take(2 * KEY_BYTES)) if flags & _PARENTED else None
        dimensions = reader.unpack(_SHAPE) if flags & _SHAPED else None
        precision = Precision.parse(reader.text())
        domain, document = reader.text(), reader.text()
        shape = None
        if dimensions is not None:
            layers, heads, dim = dimensions
            shape = ValueShape(layers, heads, dim, reader.text())
        reader.finish()
        for pieces in (extents, parts):
            if sum(piece.num_bytes for piece in pieces) != num_bytes:
                raise ValueError(f"the pieces of the value do not add up to {num_bytes} bytes")
        return cls(
            extents,
            VariantInfo(
                num_tokens, num_bytes, base_position, Provenance(bool(flags & _EXACT)), precision
            ),
            shape,
            parts,
            Origin(prefix_chunks, parent, domain, document, cost_s, token_s, influence),
            value_format,
            delete_sequence,
            put_order,
            tag,
            encryption,
        )


class ByteReader:
    """Reads fields one after another. Every method raises ValueError at the end of the bytes."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    def take(self, num_bytes: int) -> bytes:
        """Return the next num_bytes."""
        found = self._raw[self._at : self._at + num_bytes]
        if len(found) < num_bytes:
            raise ValueError("the metadata ends too early")
        self._at += num_bytes
        return found

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Return the next numbers."""
        return layout.unpack(self.take(layout.size))

    def text(self) -> str:
        """Return the next text."""
        (length,) = _LENGTH.unpack(self.take(_LENGTH.size))
        return self.take(length).decode()

    def finish(self) -> None:
        """Check that no bytes are left."""
        if self._at != len(self._raw):
            raise ValueError("the metadata has bytes after its end")
