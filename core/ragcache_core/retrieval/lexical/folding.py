"""Folds characters that readers take for the same ones. Stored texts stay as they are.

Source: Unicode Standard Annex 15 (NFC and NFKC) and section 3.13 of the standard (case folding).
"""

from __future__ import annotations

import re
import unicodedata

_VARIATION_SELECTORS = range(0xFE00, 0xFE10)
_MAX_ACCENT_CLASS = 36
_MIN_ACCENT_CLASS = 200
"""Combining classes of accents and of vowel points: 10 to 36 (Hebrew, Arabic, Syriac) and 200 or
more. Marks of other scripts are letters to their readers and stay."""


def _is_invisible(character: str) -> bool:
    return unicodedata.category(character) == "Cf" or ord(character) in _VARIATION_SELECTORS


def _is_accent(character: str) -> bool:
    combining = unicodedata.combining(character)
    return 10 <= combining <= _MAX_ACCENT_CLASS or combining >= _MIN_ACCENT_CLASS


_CHARACTERS = [chr(code) for code in range(0x80, 0x10000)]
_INVISIBLE = "".join(filter(_is_invisible, _CHARACTERS))
_ACCENTS = "".join(filter(_is_accent, _CHARACTERS))
_IS_INVISIBLE = re.compile(f"[{_INVISIBLE}]+")
_IS_DROPPED = re.compile(f"[{_INVISIBLE}{_ACCENTS}]+")
_HYPHENS = str.maketrans(dict.fromkeys("\u2010\u2012\u2013\u2212", "-"))


def folded(text: str) -> str:
    """Return a text without case, accents, invisible characters and forms of width.

    Soft hyphens and zero-width characters are left out, and hyphens become the one of ASCII.
    """
    if text.isascii():
        return text.lower()
    plain = _IS_DROPPED.sub("", unicodedata.normalize("NFKD", text))
    return unicodedata.normalize("NFKC", plain.casefold()).translate(_HYPHENS)


def comparable(text: str) -> str:
    """Return what texts have in common that differ in white space and invisible characters only."""
    if not text.isascii():
        text = _IS_INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    return " ".join(text.split())
