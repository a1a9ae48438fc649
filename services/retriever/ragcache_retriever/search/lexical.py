"""The terms of a question for the lexical leg, and how much each part of a chunk counts.

The backend searches for chunks with any of the terms and ranks them by BM25. The cost of that grows
with the number of chunks that have one of the terms, so common words of English are left out.
"""

from __future__ import annotations

from ragcache_core.retrieval.lexical.terms import is_identifier, terms_of

TITLE_WEIGHT = 2.0
HEADINGS_WEIGHT = 1.0
TEXT_WEIGHT = 1.0
"""Weights of BM25, chosen on MuSiQue. A word of a title says more than one of a text. Headings
often repeat the title."""

MAX_TERMS = 48
"""Most terms of one question. A longer question keeps its identifiers and its longest words, which
are rarer."""

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


def question_terms(question: str) -> list[str]:
    """Return the distinct terms to search for, in the question's order.

    If all terms of a question are common words, all of them count.
    """
    terms = list(dict.fromkeys(terms_of(question)))
    kept = [term for term in terms if term not in _COMMON] or terms
    if len(kept) <= MAX_TERMS:
        return kept
    # Of terms of one length every other one comes first: pairs of characters overlap, and every
    # other one covers the whole question.
    position = {term: i for i, term in enumerate(kept)}
    best = sorted(
        kept,
        key=lambda term: (not is_identifier(term), -len(term), position[term] % 2, position[term]),
    )
    chosen = set(best[:MAX_TERMS])
    return [term for term in kept if term in chosen]
