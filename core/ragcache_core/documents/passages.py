"""The label of a passage: the line before its text that tells a model which document it is from.

A label is made from the document and the chunk alone. It has no number and no rank, so the chunk
has the same tokens in every prompt, and its stored KV stays usable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

from ragcache_core.documents.formats import suffix_of

MAX_NAME_BYTES = 72
MAX_HEADING_BYTES = 42
MAX_LABEL_BYTES = 120
"""UTF-8 bytes bound the tokens of every script: few tokenizers have more tokens than bytes."""

_PART_SEPARATOR = " > "
_GAP = " ... "
_MAX_LEADING_LINES = 16

_WORD = re.compile(r"[^\W\d_]{3,}|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{2,}")
_HEX_DIGITS = re.compile(r"(?:0x)?[0-9a-f]+", re.IGNORECASE)
_ID_PARTS = re.compile(r"[\s._+~-]+")
_MARKUP = re.compile(r"<[^<>]{0,200}>|^\s*#{1,6}\s|[*_`]|\s#+\s*$")
_UNDERLINE = re.compile(r"=+|-+")


def document_name(document_id: str, title: str) -> str:
    """Return how a label names a document; empty if neither title nor id is a name.

    Args:
        title: Equal to the id for a document without a title. Then a file name gives the name,
            without folder and suffix, and a number or a hash gives none.
    """
    if title != document_id:
        return title
    path = document_id
    if "://" in path:
        path = re.split(r"[?#]", path, maxsplit=1)[0]
    last = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    name = last.removesuffix(last[-len(suffix) :]) if (suffix := suffix_of(last)) else last
    parts = _ID_PARTS.split(name)
    has_word = any(_WORD.fullmatch(part) for part in parts)
    # "feed", "cafe" and "decade" are words: a hash has digits.
    has_digit = any(character.isdigit() for character in name)
    is_hex = has_digit and all(_HEX_DIGITS.fullmatch(part) for part in parts if part)
    return name if has_word and not is_hex else ""


def passage_label(name: str, heading_path: Sequence[str], text: str) -> str:
    """Return the line before a chunk's text in prompts, with its line break; empty if it has none.

    The label has the document's name and the chunk's headings, outermost first, without those that
    the chunk's own first lines repeat. Long names and headings lose their middle, so that two that
    differ at their ends stay different. A long path loses its outer headings.

    Args:
        name: ``document_name`` of the document.
        text: The chunk.
    """
    flat = [" ".join(part.split()) for part in (name, *heading_path)]
    seen = _repeated(text, {_folded(part) for part in flat})
    parts: list[str] = []
    for i, part in enumerate(flat):
        folded = _folded(part)
        if folded and folded not in seen:
            seen.add(folded)
            parts.append(_shortened(part, MAX_HEADING_BYTES if i else MAX_NAME_BYTES))
    while len(parts) > 2 and len(_joined(parts).encode()) > MAX_LABEL_BYTES:
        del parts[1]
    return _joined(parts) if parts else ""


def _joined(parts: Sequence[str]) -> str:
    return f"[{_PART_SEPARATOR.join(parts)}]\n"


def _repeated(text: str, headings: Set[str]) -> set[str]:
    """Return the headings that a chunk's first lines consist of."""
    found = set()
    for line in text.split("\n", _MAX_LEADING_LINES)[:_MAX_LEADING_LINES]:
        folded = _folded(line)
        if folded in headings:
            found.add(folded)
        elif folded and not _UNDERLINE.fullmatch(folded):
            break
    return found


def _folded(heading: str) -> str:
    """Return a heading without markup, case and extra white space."""
    return " ".join(_MARKUP.sub("", heading).split()).casefold()


def _shortened(text: str, max_bytes: int) -> str:
    """Return a text of at most ``max_bytes``, without its middle if it is longer."""
    content = text.encode()
    if len(content) <= max_bytes:
        return text
    last = max_bytes // 3
    first = max_bytes - last - len(_GAP)
    begin = content[:first].decode(errors="ignore")
    end = content[-last:].decode(errors="ignore")
    return f"{_at_word_end(begin)}{_GAP}{_at_word_start(end)}"


def _at_word_end(text: str) -> str:
    """Return a text without the part of a word at its end, if it has several words."""
    return text.rpartition(" ")[0] or text


def _at_word_start(text: str) -> str:
    """Return a text without the part of a word at its start, if it has several words."""
    return text.partition(" ")[2] or text
