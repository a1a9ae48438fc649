"""The words of a question for the lexical leg, and how much each part of a chunk counts.

The backend searches for chunks with any of the words and ranks them by BM25. The cost of that grows
with the number of chunks that have one of the words, so common words of English are left out.
"""

from __future__ import annotations

import re

TITLE_WEIGHT = 2.0
HEADINGS_WEIGHT = 1.0
TEXT_WEIGHT = 1.0
"""Weights of BM25, chosen on MuSiQue. A word of a title says more than one of a text. Headings
often repeat the title."""

MAX_WORDS = 48
"""Most words of one question. A longer question keeps its longest words, which are rarer."""

_WORD = re.compile(r"[^\W_]+")
_COMMON = frozenset(
    """
    a about above after again against all also am an and any are as at be because been before
    being below between both but by can could did do does doing during each few for from further
    had has have having he her here hers him his how i if in into is it its itself just me more
    most my no nor not now of off on once only or other our out over own same she should so some
    such than that the their them then there these they this those through to too under until up
    very was we were what when where which while who whom why will with would you your
    """.split()  # noqa: SIM905
)


def question_words(question: str) -> list[str]:
    """Return the distinct words to search for, in lower case and in the question's order.

    If all words of a question are common, all of them count.
    """
    words = list(dict.fromkeys(_WORD.findall(question.lower())))
    kept = [word for word in words if word not in _COMMON] or words
    if len(kept) <= MAX_WORDS:
        return kept
    longest = set(sorted(kept, key=lambda word: (-len(word), word))[:MAX_WORDS])
    return [word for word in kept if word in longest]
