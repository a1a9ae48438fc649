"""Decodes text files: by the encoding that the client names, by their mark, or by a guess."""

from __future__ import annotations

import codecs
import encodings
import pkgutil
import re
from encodings.aliases import aliases
from typing import Final

from charset_normalizer import from_bytes

from ragcache_gateway.extraction.extracted import ExtractedText, UnreadableDocument

MARKS: Final = (
    # The mark of UTF-16 is the beginning of that of UTF-32.
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_GUESSED: Final = (
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257"),
    *("cp932", "euc_jp", "gb18030", "big5", "cp949"),
)
_WESTERN: Final = "cp1252"
_UNSAFE: Final = frozenset(
    {"idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape", "utf_7"}
)
"""Codecs that are no encodings of files, take quadratic time, or give halves of characters."""

_NAMES: Final = frozenset(
    (*aliases, *aliases.values(), *(one.name for one in pkgutil.iter_modules(encodings.__path__)))
)
"""Python remembers each other name that is looked up for ever."""

_BINARY: Final = (
    "is binary (it contains NUL bytes)",
    "send text, or name its encoding or format",
)
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_MIN_RIGHT: Final = 4
_MAX_GUESSED_BYTES: Final = 1 << 16
_SAMPLE_BYTES: Final = 1 << 12
_MIN_ZEROS: Final = 0.3
"""Share of zeros among the high bytes of Latin text in UTF-16; other scripts have line breaks."""


def is_encoding(name: str) -> bool:
    """Whether files can be decoded by an encoding of this name."""
    if encodings.normalize_encoding(name).lower() not in _NAMES:
        return False
    try:
        info = codecs.lookup(name)
    except (LookupError, ValueError):
        return False
    return info._is_text_encoding and info.name.replace("-", "_") not in _UNSAFE


def decode_named(content: bytes, encoding: str) -> str:
    """Decode by an encoding that the client names. Raises UnreadableDocument."""
    try:
        text = content.decode(encoding)
    except (UnicodeDecodeError, UnicodeError) as error:
        at = f"byte {error.start}" if isinstance(error, UnicodeDecodeError) else str(error)
        problem = f"is not text in {encoding} ({at})"
        raise UnreadableDocument(problem, "name its encoding, or leave it out") from error
    return checked(text.removeprefix("\ufeff"))


def decode_plain(content: bytes) -> str | None:
    """Decode text in UTF-8, or with a mark. Return None for other text.

    Raises:
        UnreadableDocument: There is a mark, and the text is not what it says.
    """
    for mark, encoding in MARKS:
        if content.startswith(mark):
            return decode_named(content, encoding)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else checked(text)


def decoded(content: bytes) -> tuple[str, tuple[str, ...]]:
    """Decode a text file, with one kind of line break.

    Returns:
        The text, and a warning if its encoding was assumed.

    Raises:
        UnreadableDocument: It is no text, or empty.
    """
    text = decode_plain(content)
    warnings: tuple[str, ...] = ()
    if text is None:
        text, encoding = decode_guessed(content)
        warnings = (assumed_encoding(encoding),)
    return text.replace("\r\n", "\n").replace("\r", "\n"), warnings


def assumed_encoding(encoding: str) -> str:
    """Return the warning that an encoding was assumed."""
    return f"the encoding is taken to be {encoding}; name it with encoding if it is another one"


def read_text(content: bytes) -> ExtractedText:
    """Read plain text. Raises UnreadableDocument."""
    text, warnings = decoded(content)
    return ExtractedText(text, markdown=False, warnings=warnings)


def decode_guessed(content: bytes) -> tuple[str, str]:
    """Decode text of an unknown encoding.

    Returns:
        The text, and the encoding that was assumed.

    Raises:
        UnreadableDocument: It is no text.
    """
    is_wide = b"\0" in content
    if not is_wide and (text := _nearly_utf_8(content)) is not None:
        return checked(text), "utf-8"
    encoding = _wide_encoding(content) if is_wide else _narrow_encoding(content)
    if encoding is None and is_wide:
        raise UnreadableDocument(*_BINARY)
    if encoding is None:
        raise UnreadableDocument("is no text in a known encoding", "name its encoding or format")
    return decode_named(content, encoding), encoding


def checked(text: str) -> str:
    """Return text that is not empty and not binary. Raises UnreadableDocument for other text."""
    if "\0" in text:
        raise UnreadableDocument(*_BINARY)
    if not text.strip():
        raise UnreadableDocument("is empty", "send a document with text")
    return text


def _nearly_utf_8(content: bytes) -> str | None:
    """Return text in UTF-8 with few wrong bytes, such as a log whose end was cut."""
    text = content.decode("utf-8", "replace")
    wrong = text.count("\ufffd")
    right = sum(1 for _ in _NOT_ASCII.finditer(text)) - wrong
    return text if right > _MIN_RIGHT * wrong else None


def _wide_encoding(content: bytes) -> str | None:
    """Return the form of UTF-16 or UTF-32 whose zeros the content has."""
    sample = content[:_SAMPLE_BYTES]
    quarters = [sample[i::4] for i in range(4)]
    zeros = [one.count(0) / max(len(one), 1) for one in quarters]
    if len(content) % 4 == 0 and min(zeros[3], zeros[2]) == 1 > zeros[0]:
        return "utf-32-le"
    if len(content) % 4 == 0 and min(zeros[0], zeros[1]) == 1 > zeros[3]:
        return "utf-32-be"
    low, high = zeros[0] + zeros[2], zeros[1] + zeros[3]
    if len(content) % 2 or max(low, high) < 2 * _MIN_ZEROS or min(low, high) > max(low, high) / 10:
        return None
    return "utf-16-le" if high > low else "utf-16-be"


def _narrow_encoding(content: bytes) -> str | None:
    """Return the likely encoding of text with bytes over 127."""
    # Lines without such bytes tell nothing, and the others may be far down.
    lines = (line for line in content.split(b"\n") if not line.isascii())
    sample = b"\n".join(lines)[:_MAX_GUESSED_BYTES]
    found = from_bytes(_whole_characters(sample), cp_isolation=list(_GUESSED))
    best = found.best()
    if best is None:
        return None
    alike = [one for one in found if (one.chaos, one.coherence) == (best.chaos, best.coherence)]
    names = [name for one in alike for name in one.could_be_from_charset]
    return _first_that_fits(content, (_WESTERN, *names) if _WESTERN in names else names)


def _whole_characters(sample: bytes) -> bytes:
    """Return the sample without a character that its limit has cut."""
    if len(sample) < _MAX_GUESSED_BYTES:
        return sample
    return re.sub(rb"[\x80-\xff]+[^\x80-\xff]{0,3}\Z", b"", sample) or sample


def _first_that_fits(content: bytes, names: tuple[str, ...] | list[str]) -> str | None:
    for name in names:
        try:
            content.decode(name)
        except UnicodeDecodeError:
            continue
        return name
    return None
