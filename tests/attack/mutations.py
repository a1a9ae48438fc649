"""Mutations of valid messages. The same seed makes the same ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

T = TypeVar("T")

ODD_TEXTS: Final = (
    *("", " ", "\0", "\ufeff", "\u202e", "a" * 5000, "é" * 3000, "<|im_end|>", "../../x"),
    *("{}", "[" * 3000, "'; DROP TABLE documents; --", "%s%n", "-1", "1e999", "a\r\nb", "\x1b]0;x"),
)
ODD_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, 0, -1, 1.5, 1e308, float("inf"), float("nan"), 2**63, -(2**64), 10**400),
    *(*ODD_TEXTS, "\ud800"),
    *([], {}, [[]], {"": {}}, [None] * 300, {"a": {"b": {"c": [1, {"d": "e"}]}}}),
)
ODD_INTEGERS: Final = (
    *(0, 1, -1, 2, 255, 1 << 16, (1 << 31) - 1, -(1 << 31), (1 << 32) - 1, 1 << 53),
    *((1 << 63) - 1, -(1 << 63), (1 << 64) - 1),
)
ODD_FLOATS: Final = (*(0.0, -0.0, 0.5, -1.0, 1e-300, 1e30), *map(float, ("inf", "-inf", "nan")))
ODD_LENGTHS: Final = (0, 1, 15, 16, 17, 31, 32, 5000)
JUNK: Final = (b'"', b"\\", b"[", b"}", b",", b"\xff", b"\\ud83d", b"1e9", b"\x80" * 9, b"\n\n")
MAX_BYTES: Final = 256 << 10
"""Bound of a message before values are repeated, so that turns do not multiply without end."""
_LARGE_SHARE: Final = 0.02
"""Of repetitions: those with more values than any field takes."""


def with_odd_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change, remove, insert or repeat bytes, or end before them."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        i = rng.randrange(len(found) + 1)
        j = min(len(found), i + rng.choice((1, 2, 8, 64)))
        match rng.randrange(6):
            case 0:
                del found[i:j]
            case 1:
                found[i:i] = rng.randbytes(rng.choice((1, 2, 9)))
            case 2:
                found[i:i] = found[i:j] * rng.choice((1, 9, 90))
            case 3:
                found[i:j] = rng.choice(JUNK)
            case 4 if i < len(found):
                found[i] ^= 1 << rng.randrange(8)
            case _:
                del found[i:]
    return bytes(found)


def with_odd_value(value: Any, rng: random.Random) -> bytes:
    """Replace, remove, rename, nest or repeat a value of JSON."""
    for turn in range(rng.randint(1, 3)):
        value = json.loads(json.dumps(value))  # so that no two places share an object
        found = list(_nodes(value))
        if not found:
            break
        container, key = rng.choice(found)
        match rng.randrange(5):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice(("", "\0", "\ud800", "x" * 300, "priority"))] = container[key]
            case 2:
                for _ in range(rng.choice((2, 60, 70, 200))):
                    container[key] = [container[key]]
            case 3:
                # Turns multiply.
                container[key] = [container[key]] * (rng.choice((2, 40, 400)) if turn == 0 else 2)
            case _:
                container[key] = rng.choice(ODD_VALUES)
    return json.dumps(value, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass")


def mutated_json(value: Any, rng: random.Random) -> bytes:
    """Return JSON with odd values, or with odd bytes."""
    if rng.random() < 0.5:
        return with_odd_value(value, rng)
    return with_odd_bytes(json.dumps(value).encode(), rng)


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value below one, as its container and its key."""
    stack = [value]
    while stack:
        container = stack.pop()
        keys: Any = range(len(container)) if isinstance(container, list) else container
        for key in keys:
            yield container, key
            if isinstance(container[key], dict | list):
                stack.append(container[key])


def mutated_message(message: Message, rng: random.Random) -> bytes:
    """Return a message of protobuf with odd fields, with odd bytes, deeply nested or unchanged."""
    match rng.randrange(8):
        case 0:
            return message.SerializeToString()
        case 1 | 2:
            return with_odd_bytes(message.SerializeToString(), rng)
        case 3:
            return _nested(message, rng)
        case _:
            return _with_odd_fields(message, rng).SerializeToString()


def _nested(message: Message, rng: random.Random) -> bytes:
    """Put a message into itself, as if each were a field of the one around it."""
    data = message.SerializeToString()
    fields: Sequence[Any] = message.DESCRIPTOR.fields
    for _ in range(rng.choice((2, 30, 99, 101, 150))):
        number = rng.choice(fields).number if fields else 1
        data = bytes([*_varint(number << 3 | 2), *_varint(len(data))]) + data
    return data


def _varint(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value


def _with_odd_fields(message: Message, rng: random.Random) -> Message:
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(rng.randint(1, 3)):
        parent = rng.choice(list(_messages(changed)))
        fields: Sequence[Any] = parent.DESCRIPTOR.fields
        if fields:
            _change(parent, rng.choice(fields), rng)
    return changed


def _messages(message: Message) -> Iterator[Message]:
    """Yield a message and those in it, but of each list only the first ones."""
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field):
            for one in list(value)[:8] if field.is_repeated else (value,):
                yield from _messages(one)


def _change(parent: Any, field: FieldDescriptor, rng: random.Random) -> None:
    """Remove a field, repeat it, or set it to an odd value."""
    if rng.random() < 0.2 or _is_map(field):
        parent.ClearField(field.name)
        return
    value = getattr(parent, field.name)
    is_message = field.type == FieldDescriptor.TYPE_MESSAGE
    if not field.is_repeated:
        if is_message:
            value.SetInParent()
        else:
            setattr(parent, field.name, _odd_scalar(field, rng))
        return
    if value and rng.random() < 0.5:
        times = rng.choice((1025, 4097) if rng.random() < _LARGE_SHARE else (1, 2, 40))
        if parent.ByteSize() * times <= MAX_BYTES:
            value.extend(value[:1] * times)
    elif is_message:
        value.add()
    else:
        value.append(_odd_scalar(field, rng))


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


_BOUNDS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def _odd_scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(ODD_FLOATS)
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_STRING:
            return rng.choice(ODD_TEXTS)
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.randbytes(rng.choice(ODD_LENGTHS))
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 77, -1))
        case kind:
            least, most = _BOUNDS[kind]
            return rng.choice([one for one in ODD_INTEGERS if least <= one <= most])


def mutated(
    corpus: Sequence[T], mutate: Callable[[T, random.Random], bytes], seed: int, count: int
) -> Iterator[tuple[T, bytes]]:
    """Yield valid messages and what became of them."""
    rng = random.Random(seed)
    for _ in range(count):
        chosen = rng.choice(corpus)
        yield chosen, mutate(chosen, rng)
