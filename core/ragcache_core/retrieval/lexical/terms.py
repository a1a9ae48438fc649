"""Divides texts and questions into terms of the lexical index, the same for every database.

A term is one of these:

- A word: letters and digits of a script with spaces.
- A character or a pair of neighbours of a script that writes no spaces between words, and of
  Korean, whose words have endings.
- An identifier, with an equals sign at its end: an address, a date, a version, an option, a path, a
  part number. It is the parts with what joins them, so their order counts. Its words are terms,
  too, but no stemmer changes the identifier itself.
- A word with the short number or the capital letter after it, such as "hall#a" of "hall A". There
  are other halls and other letters nearby.

Source of pairs: Lee and Ahn, Using n-grams for Korean text retrieval (SIGIR 1996).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

from ragcache_core.retrieval.lexical.folding import folded

MAX_TERM_CHARACTERS = 256
"""Longer words are cut, longer identifiers are left out. An index of PostgreSQL takes a third of a
page."""
_MAX_KEPT_CHARACTERS = 64
IDENTIFIER_MARK = "="
IDENTIFIER_SYMBOLS = "-_./:@\\+#,"
"""All symbols that identifiers have, besides the mark."""

_WITH_SINGLES = (
    r"\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Han and Hangul. One character is often a word."""
_PAIRS_ONLY = (
    r"\u0e01-\u0e4e\u0e80-\u0ece\u1000-\u1049\u1780-\u17d3"
    r"\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
)
"""Kana, Thai, Lao, Burmese and Khmer."""
_MARKS = "".join(chr(i) for i in range(0x300, 0x2000) if unicodedata.category(chr(i))[0] == "M")
_UNSPACED = re.compile(f"([{_WITH_SINGLES}{_PAIRS_ONLY}]+)")
_SINGLE = re.compile(f"[{_WITH_SINGLES}]")
_LETTER = rf"(?:[^\W_]|[{_MARKS}])"
_WORD = re.compile(f"{_LETTER}+")
_BEGIN = (
    r"(?:(?:(?<![\w+-])--?|(?<![\w.])\.|(?<![\w.+#/:)\]}-])/|(?<!\w)@|(?<!\w)__?)(?=[^\W\d_])"
    rf"|(?<![^\W_])(?={_LETTER}))"
)
_END = r"(?:\+\+|[+#](?![\w+#])|__?(?!\w))?"
_NUMBER_COMMA = r"(?<=\d),(?=\d)"
_WHOLE = re.compile(
    rf"{_BEGIN}{_LETTER}+(?:(?:://|::|:\\|[-./:@\\+]|_+|{_NUMBER_COMMA}){_LETTER}+)*{_END}"
)
_SEGMENT = re.compile(rf"{_BEGIN}{_LETTER}+(?:(?:[-.+]|_+|{_NUMBER_COMMA}){_LETTER}+)*{_END}")
"""A part of an identifier between slashes, colons and at signs."""
_DATE_AND_TIME = re.compile(r"(?<=\d-\d\d)t(?=\d\d:)")
_VERSION = re.compile(r"v(\d+(?:\.\d+)+.*)")
_PHRASE = re.compile(r"\d{1,4}[a-z]{1,2}|\d{1,3}-[a-z]{3,}|[^-_./:@\\][^_./:@\\]*-[^\W\d_]{6,}")
"""An amount, or words with a hyphen: such as "5km", "12-month" and "E4-based"."""
_NAME = re.compile(
    r"(?:--?|[./@])[^\W\d].*"  # such as ".NET" and "-v"
    r"|[^\W\d_]+[+#]+"  # C++
    r"|.*(?:[_@\\]|::|:/|/.*/).*"
    rf"|(?:.*[-/:])?{_LETTER}{{2,}}\.{_LETTER}{{2,}}.*"  # config.yaml, and not "e.g"
)
_THOUSANDS = re.compile(r"[\d,.]*,\d{3}[\d,.]*")
_DIGIT = re.compile(r"\d")
_MIN_DECIDING_DIGITS = 3
"""Names of few digits, such as "IL-6" and "2.5", are written in several ways or are amounts."""
_CODE = re.compile(r"\d{5,}|(?=.*\d)(?=.*[^\W\d]).*")
"""A word that is an identifier: it has letters and digits, or more digits than a year."""
# A match begins with the first letter of a word, so that each word is read once.
_NUMBERED = re.compile(
    r"(?<![^\W\d_])([^\W\d_]{3,}+) ++([A-HJ-Z]|\d{1,4})(?![^\W_]|[-.,:/'+#]+[^\W_]|[+#])"
)
_OPENING, _CLOSING = "([{<\"'`*", ")]}>\"'`*.,;:!?"


def terms_of(text: str) -> list[str]:
    """Return the terms of a text or a question, with repeats."""
    terms: list[str] = []
    for token in _DATE_AND_TIME.sub(" ", folded(text)).split():
        if token.isascii() and len(token) <= _MAX_KEPT_CHARACTERS:
            terms += _terms_of_short(token)
        else:
            for i, run in enumerate(_UNSPACED.split(token)):
                terms += _unspaced_terms(run) if i % 2 else _spaced_terms(run)
    for word, number in _NUMBERED.findall(text):
        terms.append(f"{folded(word)[:MAX_TERM_CHARACTERS]}#{number.lower()}")
    return terms


def is_identifier(term: str) -> bool:
    """Whether a chunk with a term is a better hit than any without it.

    That is so for names with symbols, and for codes of at least three digits. Other identifiers
    count as words do.
    """
    name = term.removesuffix(IDENTIFIER_MARK)
    if name == term or not _is_special(name):
        return False
    is_code = len(_DIGIT.findall(name)) >= _MIN_DECIDING_DIGITS and not _THOUSANDS.fullmatch(name)
    return is_code or _NAME.fullmatch(name) is not None


def _is_special(name: str) -> bool:
    is_name = _DIGIT.search(name) or _NAME.fullmatch(name)
    return bool(is_name) and not _PHRASE.fullmatch(name)


@lru_cache(maxsize=1 << 14)
def _terms_of_short(token: str) -> tuple[str, ...]:
    """Return the terms of a token without other scripts. Such tokens repeat in texts."""
    word = token.lstrip(_OPENING).rstrip(_CLOSING)
    return (word,) if word.isalpha() else tuple(_spaced_terms(token))


def _unspaced_terms(run: str) -> Iterator[str]:
    if len(run) == 1:
        yield run
        return
    yield from _SINGLE.findall(run)
    for i in range(len(run) - 1):
        yield run[i : i + 2]


def _spaced_terms(token: str) -> Iterator[str]:
    """Yield the terms of characters without a space between them."""
    for word in _WORD.findall(token):
        if len(word) <= MAX_TERM_CHARACTERS and _CODE.fullmatch(word):
            yield word + IDENTIFIER_MARK
        else:
            yield word[:MAX_TERM_CHARACTERS]
    found = dict.fromkeys(name for names in (_WHOLE, _SEGMENT) for name in names.findall(token))
    for name in found:
        if version := _VERSION.fullmatch(name):
            yield version[1] + IDENTIFIER_MARK
        if _is_special(name) and not _WORD.fullmatch(name) and len(name) <= MAX_TERM_CHARACTERS:
            yield name + IDENTIFIER_MARK
