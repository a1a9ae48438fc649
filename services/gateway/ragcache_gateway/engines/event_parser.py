"""Reads the server-sent events of an engine (WHATWG HTML, section 9.2).

The gateway needs data lines only; the parser skips comments, names and ids of events. It splits
bytes at CR, LF and CRLF alone: a text decoder would also split at U+2028, which JSON may contain
unescaped. httpx-sse does not fit: it does not limit the size of an event.
"""

from __future__ import annotations

import re

MAX_EVENT_BYTES = 1 << 20

_LINE_END = re.compile(rb"\r\n|\n|\r")


_DATA, _END = b"data: ", b"\n\n"
_NEXT = _END + _DATA


class SseParser:
    """Turns parts of a stream, split anywhere, into the data of its events."""

    def __init__(self) -> None:
        self._incomplete_line = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """Return the data of the events that this part of the stream completes.

        Raises:
            ValueError: An event is longer than MAX_EVENT_BYTES.
        """
        if not self._incomplete_line and not self._data and _is_simple(part):
            events = part[len(_DATA) : -len(_END)].split(_NEXT)
            if b"\n" not in b"".join(events):
                return events
        *lines, self._incomplete_line = self._split_lines(self._incomplete_line + part)
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        if len(self._incomplete_line) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events

    @staticmethod
    def _split_lines(buffer: bytes) -> list[bytes]:
        # A CR at the very end may be the first half of a CRLF: keep it for the next part.
        pending = b"\r" if buffer.endswith(b"\r") else b""
        lines = _LINE_END.split(buffer[: len(buffer) - len(pending)])
        lines[-1] += pending
        return lines


def _is_simple(part: bytes) -> bool:
    """Whether a part may consist of whole events with a line of data each, as engines send them."""
    return part.startswith(_DATA) and part.endswith(_END) and b"\r" not in part
