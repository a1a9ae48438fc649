"""What a reader of a format returns, and how it refuses a document."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ragcache_core.retrieval.metadata import MetadataValue

MAX_METADATA_CHARS = 256
MAX_WARNINGS = 10
MAX_WARNING_CHARS = 240
_GENERATED = re.compile(r"\S+\.\w{3,4}|(?:Picture|Image|Grafik|Bild) ?\d+")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\ufffe\uffff]")


class UnreadableDocument(Exception):
    """A document whose text cannot be read.

    Args:
        problem: What is wrong with it.
        fix: What to do instead.
    """

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}; {fix}")
        self.problem = problem
        self.fix = fix


@dataclass(frozen=True, slots=True)
class ExtractedText:
    """The text of a document.

    Args:
        markdown: Whether the text is Markdown.
        title: The document's own title; empty if it names none.
        metadata: What the document says of itself, such as its author.
        warnings: What of the document was not read, and what was assumed.
    """

    text: str
    markdown: bool
    title: str = ""
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def cleaned(text: str) -> str:
    """Return text without control characters and with one kind of line break."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    # A lone surrogate cannot be encoded.
    text = text.encode("utf-8", "replace").decode()
    return _CONTROL.sub("", text).strip()


def short_line(text: str | None) -> str:
    """Return a value for a title or for metadata: one line of bounded length."""
    return " ".join(cleaned(text or "").split())[:MAX_METADATA_CHARS]


def description(text: str | None) -> str:
    """Return what an author says of an image, if it is no name that a program gave."""
    line = short_line(text)
    return "" if _GENERATED.fullmatch(line) else line


def metadata_of(**values: str | None) -> dict[str, str]:
    """Return the values that are not empty, each as one short line."""
    short = {name: short_line(value) for name, value in values.items()}
    return {name: value for name, value in short.items() if value}


def bounded_warnings(warnings: Sequence[str]) -> tuple[str, ...]:
    """Return the first MAX_WARNINGS as short lines, and how many more there are."""
    shown = tuple(_shortened(one) for one in warnings[:MAX_WARNINGS])
    more = len(warnings) - len(shown)
    return (*shown, f"{more} more warnings") if more else shown


def _shortened(warning: str) -> str:
    line = " ".join(cleaned(warning).split())
    return line if len(line) <= MAX_WARNING_CHARS else f"{line[: MAX_WARNING_CHARS - 1]}…"


def numbered(name: str, numbers: Sequence[int]) -> str:
    """Return a name with numbers from 1, such as ``pages 1-3, 7``.

    Args:
        name: Of one, such as ``page``.
        numbers: At least one, in order.
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"
