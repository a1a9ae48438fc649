"""One stored variant as the index and the metadata column family know it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ragcache_core.reuse import Provenance, VariantInfo

_RECORD = struct.Struct("<QQIIIBQ")


@dataclass(frozen=True, slots=True)
class Entry:
    """A variant without its value.

    slot: names the value's place on disk; slots ascend in the order of puts and are not used
    again, so a reader that still holds a replaced entry can never see another value under it.
    checksum: XXH3-64 of the value. value_format: version of the value's layout.
    """

    slot: int
    info: VariantInfo
    checksum: int
    value_format: int

    def to_bytes(self) -> bytes:
        """Record in the metadata column family."""
        return _RECORD.pack(
            self.slot,
            self.info.num_bytes,
            self.info.num_tokens,
            self.info.base_position,
            self.value_format,
            self.info.provenance.exact,
            self.checksum,
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Entry:
        """Inverse of to_bytes. Raises struct.error for any other length."""
        slot, num_bytes, num_tokens, base, value_format, exact, checksum = _RECORD.unpack(raw)
        info = VariantInfo(num_tokens, num_bytes, base, Provenance(bool(exact)))
        return cls(slot, info, checksum, value_format)
