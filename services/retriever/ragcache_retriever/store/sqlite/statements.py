"""Encodes the statements of a transaction, which followers repeat.

The encoding holds values only: no code and no Python objects. Numbers are little-endian. Each
distinct SQL text is stored once, because a document's chunks share one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ragcache_retriever.store.change_log import ChangedRows

Value: TypeAlias = int | float | str | bytes | None

_MAGIC = b"RGS1"
_COUNT = struct.Struct("<I")
_INTEGER = struct.Struct("<q")
_REAL = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Statement:
    """One SQL text and the parameters of each of its executions."""

    sql: str
    executions: Sequence[Sequence[Value]]


@dataclass(slots=True)
class StatementLog:
    """What a transaction has executed so far, and what it means for indexes."""

    statements: list[Statement] = field(default_factory=list)
    rows: list[ChangedRows] = field(default_factory=list)
    has_other_collections: bool = False

    def encode(self) -> bytes:
        """Return the encoded log."""
        texts = {statement.sql: 0 for statement in self.statements}
        for i, sql in enumerate(texts):
            texts[sql] = i
        parts = [_MAGIC, bytes([self.has_other_collections]), _COUNT.pack(len(self.rows))]
        for changed in self.rows:
            parts += (
                _INTEGER.pack(changed.generation),
                *_encode_rows(changed.removed),
                *_encode_rows(changed.added),
            )
        parts.append(_COUNT.pack(len(texts)))
        for sql in texts:
            parts += _encode_bytes(sql.encode())
        parts.append(_COUNT.pack(len(self.statements)))
        for statement in self.statements:
            parts += (_COUNT.pack(texts[statement.sql]), _COUNT.pack(len(statement.executions)))
            for values in statement.executions:
                parts.append(_COUNT.pack(len(values)))
                for value in values:
                    parts += _encode_value(value)
        return b"".join(parts)


def decode(content: bytes) -> StatementLog:
    """Return an encoded log. Raises ValueError if the content is not one."""
    reader = _StatementReader(content)
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise ValueError("not an encoded transaction")
    log = StatementLog(has_other_collections=reader.take(1) != b"\0")
    for _ in range(reader.count()):
        log.rows.append(ChangedRows(reader.integer(), reader.rows(), reader.rows()))
    texts = [reader.text() for _ in range(reader.count())]
    for _ in range(reader.count()):
        index, num_executions = reader.count(), reader.count()
        if index >= len(texts):
            raise ValueError("a statement has no SQL text")
        executions = [
            tuple(reader.value() for _ in range(reader.count())) for _ in range(num_executions)
        ]
        log.statements.append(Statement(texts[index], executions))
    if not reader.is_at_end:
        raise ValueError("bytes after the end of the transaction")
    return log


def _encode_rows(rows: Sequence[int]) -> Iterable[bytes]:
    return _COUNT.pack(len(rows)), struct.pack(f"<{len(rows)}q", *rows)


def _encode_bytes(content: bytes) -> Iterable[bytes]:
    return _COUNT.pack(len(content)), content


def _encode_value(value: Value) -> Iterable[bytes]:
    match value:
        case None:
            return (b"n",)
        case int():
            return b"i", _INTEGER.pack(value)
        case float():
            return b"r", _REAL.pack(value)
        case str():
            return b"t", *_encode_bytes(value.encode())
        case _:
            return b"b", *_encode_bytes(bytes(value))


class _StatementReader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._content)

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._content):
            raise ValueError("the transaction is cut off")
        taken = self._content[self._at : end]
        self._at = end
        return taken

    def count(self) -> int:
        (count,) = _COUNT.unpack(self.take(_COUNT.size))
        return int(count)

    def integer(self) -> int:
        (value,) = _INTEGER.unpack(self.take(_INTEGER.size))
        return int(value)

    def rows(self) -> tuple[int, ...]:
        count = self.count()
        return struct.unpack(f"<{count}q", self.take(count * _INTEGER.size))

    def text(self) -> str:
        return self.take(self.count()).decode()

    def value(self) -> Value:
        match self.take(1):
            case b"n":
                return None
            case b"i":
                return self.integer()
            case b"r":
                return float(_REAL.unpack(self.take(_REAL.size))[0])
            case b"t":
                return self.text()
            case b"b":
                return self.take(self.count())
            case tag:
                raise ValueError(f"unknown kind of value {tag!r}")
