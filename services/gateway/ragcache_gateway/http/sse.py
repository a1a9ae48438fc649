"""Server-sent events, both ways: framing ours, taking the engine's apart.

Of the standard (WHATWG HTML, §9.2) only data lines matter here; comments, names and ids of events
are passed over. Bytes are split at CR, LF and CRLF alone: a text decoder's idea of a line would
also break at U+2028, which JSON may hold unescaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"
"""The end of a stream, as OpenAI marks it."""

MAX_EVENT_BYTES = 1 << 20

_LINE_END = re.compile(rb"\r\n|\n|\r")


def frame(value: Mapping[str, Any]) -> bytes:
    """One event that carries a JSON object; in ASCII, for clients that split text into lines."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class EventParser:
    """Turns pieces of a stream, cut anywhere, into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that piece completes. Raises ValueError for an endless event."""
        *lines, self._rest = self._lines(self._rest + piece)
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events

    @staticmethod
    def _lines(buffer: bytes) -> list[bytes]:
        # A CR at the very end may be the first half of a CRLF: leave it for the next piece.
        held = b"\r" if buffer.endswith(b"\r") else b""
        lines = _LINE_END.split(buffer[: len(buffer) - len(held)])
        lines[-1] += held
        return lines
