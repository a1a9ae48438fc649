"""Decodes the text of files that other readers than that of plain text read."""

from __future__ import annotations

import codecs

from ragcache_gateway.extraction.extracted import UnreadableDocument

_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decoded(content: bytes) -> tuple[str, tuple[str, ...]]:
    """Return the text of a file with one kind of line break, and warnings.

    Raises:
        UnreadableDocument: It is no text, or empty.
    """
    encoding = "utf-16" if content.startswith(_MARKS) else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start})"
        raise UnreadableDocument(problem, "save it as UTF-8") from error
    if "\0" in text:
        raise UnreadableDocument("is binary (it contains NUL bytes)", "send text")
    if not text.strip():
        raise UnreadableDocument("is empty", "send a document with text")
    return text.replace("\r\n", "\n").replace("\r", "\n"), ()
