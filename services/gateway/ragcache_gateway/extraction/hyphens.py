"""Decides whether a hyphen at the end of a line belongs to the word.

Typesetters break "failure" as "fail-" and "ure", and "write-ahead" after its own hyphen. The words
of the document itself decide first, then a list of words of its language.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final

WORD: Final = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_LAST_WORD: Final = re.compile(r"[^\W_]*\Z")
_FIRST_WORD: Final = re.compile(r"[^\W_]*")

_SUSPENDING: Final = frozenset(
    ("and", "or", "to", "und", "oder", "bis", "et", "ou", "y", "o", "e", "en", "of")
)
"""Words after the hyphen of "pre- and post-processing"."""

_PREFIXES: Final = frozenset(
    ("multi", "non", "pre", "post", "semi", "quasi", "pseudo", "micro", "macro", "meta", "sub")
)
"""They form words that no list has, such as "multi-node"."""

_FREQUENT_WORDS: Final = {
    "en": "the and of to is for with that",
    "de": "der die und das ist nicht mit für",
    "fr": "le la les et des est une dans",
    "es": "el los que una las por con para",
    "it": "il che di per una sono della con",
    "pt": "que não para uma os com dos são",
    "nl": "het een van dat niet zijn voor met",
}
_JOINING: Final = frozenset({"de", "nl"})
"""Languages that write compounds as one word, more of them than a list can have."""

_MIN_FREQUENT_SHARE: Final = 0.05

KnownWords = Callable[[str], Container[str]]
"""Returns the words of a language, by its code."""


def words_of(lines: Iterable[str]) -> Counter[str]:
    """Count words and words with hyphens, in lower case."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(word.casefold() for word in WORD.findall(line))
    return counts


def language_of(words: Mapping[str, int]) -> str:
    """Return the code of the language of most of the words; English if it is not clear."""
    shares = {
        language: sum(words.get(word, 0) for word in frequent.split())
        for language, frequent in _FREQUENT_WORDS.items()
    }
    best = max(shares, key=lambda language: shares[language])
    return best if shares[best] > _MIN_FREQUENT_SHARE * sum(words.values()) else "en"


class HyphenChoice:
    """Chooses for the hyphens of one document.

    Args:
        words: Of the document, without the parts of broken words.
        known_words: Is called once, if the document itself does not decide.
    """

    def __init__(self, words: Mapping[str, int], known_words: KnownWords) -> None:
        self._words = words
        self._known_words = known_words
        self._language = language_of(words)
        self._known: Container[str] | None = None

    def joined(self, before: str, after: str) -> str:
        """Return a line without its last hyphen, joined with the next line.

        The result is one of ``before + after``, ``before-after`` and ``before- after``.
        """
        first, last = _FIRST_WORD.match(after), _LAST_WORD.search(before)
        assert first is not None
        assert last is not None
        return f"{before}{self._joint(before, last[0], first[0])}{after}"

    def _joint(self, before: str, left: str, right: str) -> str:
        token = (before.split() or [""])[-1]
        if _keeps_its_hyphen(token, left, right):
            return "-"
        low_left, low_right = left.casefold(), right.casefold()
        whole = low_left + low_right
        num_whole = self._words.get(whole, 0)
        num_compounds = self._words.get(f"{low_left}-{low_right}", 0)
        if num_whole or num_compounds:
            return "" if num_whole > num_compounds else "-"
        if low_right in _SUSPENDING and "-" not in token and not self._is_known(whole):
            return "- "
        if self._language in _JOINING or self._is_known(whole):
            return ""
        is_compound = left.isupper() or (
            (low_left in _PREFIXES or self._is_known(low_left)) and self._is_known(low_right)
        )
        return "-" if is_compound else ""

    def _is_known(self, word: str) -> bool:
        if self._known is None:
            self._known = self._known_words(self._language)
        return word in self._known or word in self._words


def _keeps_its_hyphen(token: str, left: str, right: str) -> bool:
    """Whether no rule of hyphenation breaks here: an option, a number, a name, an address."""
    return (
        len(left) <= 1
        or not (left.isalpha() and right.isalpha())
        or token.startswith("-")
        or any(mark in token for mark in "/_@.=:\\")
        or right[0].isupper() != left.isupper()
    )
