"""What a reader of a format returns, and how it refuses a document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ragcache_core.retrieval.metadata import MetadataValue

MAX_METADATA_CHARS = 256
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


def metadata_of(**values: str | None) -> dict[str, str]:
    """Return the values that are not empty, each as one short line."""
    short = {name: short_line(value) for name, value in values.items()}
    return {name: value for name, value in short.items() if value}
