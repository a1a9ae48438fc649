"""Messages that carry a piece of a value, without copies of the piece.

Generated code copies a bytes field when a message is made, encoded, decoded and read: four copies
of every piece of a value on each side. PutPart and GetPart both carry it as field 2, so a message
with nothing else in it is the field's tag, its length, and the piece.
"""

from __future__ import annotations

_DATA_TAG = 0x12  # field 2, length-delimited


def encode_data(piece: bytes | memoryview) -> bytes:
    """A PutPart or GetPart whose data is piece."""
    return b"".join((bytes((_DATA_TAG,)), _varint(len(piece)), piece))


def data_of(message: bytes) -> memoryview | None:
    """The data of an encoded PutPart or GetPart, as a view into it.

    None unless the message is exactly what encode_data makes, as every encoder does for such a
    message; generated code reads the others.
    """
    if len(message) < 2 or message[0] != _DATA_TAG:
        return None
    length = shift = 0
    for position in range(1, min(len(message), 6)):
        byte = message[position]
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            data = memoryview(message)[position + 1 :]
            return data if len(data) == length else None
    return None


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
