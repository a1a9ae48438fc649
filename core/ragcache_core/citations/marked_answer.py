"""Adds markers of citations to an answer while it is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ragcache_core.citations.support import Support, SupportIndex

_TAIL_CHARS: Final = 8
"""Characters before a part that decide whether a sentence ends at its beginning."""

_MAX_SENTENCE_CHARS: Final = 4000
"""Longer sentences get no marker, so that an answer without an end costs little."""

_END: Final = re.compile(
    r"(?<=[.!?])[\"'\u201d\u2019)\]*_]*(?=\s)|(?<=[\u3002\uff01\uff1f])|(?=\n)"
)
"""Where a sentence ends: before the space after it. So "3.5" has no end in it."""

_NO_END: Final = re.compile(
    r"^\W*(\d{1,3}|\w)\.$|\b(e\.g|i\.e|z\.B|d\.h|Dr|Mr|Mrs|Ms|St|vs|approx|cf|ca|No|Fig)\.$"
)
"""Numbers of lists and frequent abbreviations, after which a sentence goes on."""

_UNMARKED: Final = ("|", "#")
"""What lines of tables and headings begin with."""

_FENCE: Final = re.compile(r"(?:(?:[-*+>]|\d{1,3}[.)])\s+)*(`{3,}|~{3,})([^`]*)", re.DOTALL)
"""A line that begins or ends a block of code, which may be in a list or a quote."""

_NO_WORDS: Final = re.compile(r"^\W*\d{1,3}[.)]\s|\[\d+\]")
"""Numbers of lists and of the model's own citations."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A sentence of an answer with the text that supports it.

    Args:
        start: First character of the sentence, in the answer with its markers.
        end: The character after its last one. The marker follows.
        marker_end: The character after the marker.
    """

    support: Support
    start: int
    end: int
    marker_end: int


class MarkedAnswer:
    """An answer to whose sentences markers are added, each after the end of its sentence.

    A marker is a space and the number of the source in brackets, from 1. A sentence without support
    gets none. Text inside of a fenced block of code gets none either.

    Attributes:
        marks: Those so far.
    """

    def __init__(self, index: SupportIndex) -> None:
        self._index = index
        self._sentence = ""
        self._tail = ""  # the last characters of the sentence.
        self._length = 0  # of the text that was returned.
        self._start = 0  # of the sentence, in that text.
        self._fence = ""  # the beginning of the open block of code.
        self._in_row = False  # whether the line is part of a table or a heading
        self._is_first = True
        self.marks: list[Mark] = []

    def add(self, text: str) -> str:
        """Return the next part of the answer with the markers of sentences that it ends."""
        parts: list[str] = []
        position = 0
        # The end of a sentence shows at the space after it, which may be in the next part.
        before = self._tail
        for found in _END.finditer(before + text):
            end = found.end() - len(before)
            if end < 0:
                continue
            parts.append(self._take(text[position:end]))
            position = end
            if _NO_END.search(self._sentence.strip()) is None:
                parts.append(self._end_sentence())
        parts.append(self._take(text[position:]))
        return "".join(parts)

    def finish(self) -> str:
        """Return the marker of the last sentence, if it has one."""
        return self._end_sentence()

    def _take(self, text: str) -> str:
        if len(self._sentence) <= _MAX_SENTENCE_CHARS:
            self._sentence += text
        self._tail = (self._tail + text)[-_TAIL_CHARS:]
        self._length += len(text)
        return text

    def _end_sentence(self) -> str:
        sentence, start = self._sentence, self._start
        self._sentence, self._tail, self._start = "", "", self._length
        stripped = sentence.strip()
        if self._is_first or "\n" in sentence:
            self._in_row = stripped.startswith(_UNMARKED)
        self._is_first = self._is_first and not stripped
        if (fence := _FENCE.fullmatch(stripped)) is not None:
            run, info = fence.groups()
            if not self._fence:
                self._fence = run
            elif run.startswith(self._fence) and not info.strip():
                self._fence = ""
            return ""
        if self._fence or self._in_row or not stripped:
            return ""
        if len(sentence) > _MAX_SENTENCE_CHARS:
            return ""
        support = self._index.find(_NO_WORDS.sub("", stripped))
        if support is None:
            return ""
        end = self._length
        marker = f" [{support.source + 1}]"
        self._length += len(marker)
        self._start = self._length
        start += len(sentence) - len(sentence.lstrip())
        self.marks.append(Mark(support, start, end, self._length))
        return marker
