"""Encodes and decodes messages that carry a piece of a value, without copying the piece.

Generated code copies a bytes field when a message is made, encoded, decoded and read. That is four
copies of every piece on each side. PutPart and GetPart both have the data as field 2. A message
with only that field is its tag, its length and the piece.
"""

from __future__ import annotations

_DATA_TAG = 0x12  # field 2, length-delimited


def encode_data(piece: bytes | memoryview) -> bytes:
    """Encode a PutPart or GetPart whose data is piece."""
    return b"".join((bytes((_DATA_TAG,)), _varint(len(piece)), piece))


def data_of(message: bytes) -> memoryview | None:
    """Return the data of an encoded PutPart or GetPart, as a view into it.

    Returns:
        The data; None if the message has other fields, which generated code then reads.
    """
    if len(message) < 2 or message[0] != _DATA_TAG:
        return None
    length = shift = 0
    for index in range(1, min(len(message), 6)):
        byte = message[index]
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            data = memoryview(message)[index + 1 :]
            return data if len(data) == length else None
    return None


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
