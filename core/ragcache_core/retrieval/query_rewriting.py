"""Makes a search query of a question that refers to earlier turns of its conversation.

A search knows the query alone. "And who owns it?" finds nothing without the nouns of the turns
before it. The rules add them where the question refers to something: by a pronoun, by a beginning
such as "what about", or because it has hardly any words of its own. A question that stands alone
stays as it is, because words of an old topic would find the old topic's documents.

The rules know English. A question in another language has no pronouns that they know, so only its
length counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

MAX_QUERY_CHARS: Final = 2000
"""Longest query. Embedders read a few hundred words; the retriever takes no more than 8,192."""

MAX_TERMS: Final = 8
"""Most words that are added. More of them outweigh the question."""

MAX_TURNS: Final = 6
"""Turns that are read, from the last one on."""

MAX_TURN_CHARS: Final = 16_384
"""Characters that are read of a turn. What a topic is called comes at its beginning, and a client
may send megabytes."""

FEW_WORDS: Final = 1
"""A question with so few words of its own refers to the turns before it."""

_WORD: Final = re.compile(r"[^\W_]+(?:[-_.'][^\W_]+)*")
_SENTENCE_ENDS: Final = (".", "!", "?", ":")

_PRONOUN_LIST: Final = (
    "it its itself they them their theirs this that these those he him his she her hers there "
    "former latter same ones others another such both neither either"
)
_PRONOUNS: Final = frozenset(_PRONOUN_LIST.split())
_STARTS: Final = re.compile(
    r"^\W*(?:and|but|or|so|then|also|what about|how about|what else|why not|how so|since when|"
    r"until when|more on|tell me more|go on|really)\b",
    re.IGNORECASE,
)
_EXISTENCE: Final = re.compile(r"\b(?:is|are|was|were)\s+there\b", re.IGNORECASE)

_COMMON_LIST: Final = (
    "a about above after again all also am an and any are aren't as ask at be because been before "
    "being below between but by can can't cannot could did do does doesn't doing don't done down "
    "during each else ever every few for from further get gets give given go going got had has "
    "have having here how i i'd i'll i'm i've if in into is isn't just know let like many may me "
    "mean might more most much must my need no nor not now of off ok okay on once only or our out "
    "over own please question answer really say says see shall should show since so some still "
    "tell than thank thanks the then thing things through to too under until up us use used uses "
    "using very want was we well were what what's when where where's which while who who's whom "
    "whose why will with within without would yes you your"
)
_NOT_OWN: Final = _PRONOUNS.union(_COMMON_LIST.split())
"""Words that do not say what a text is about."""


def rewrite_query(turns: Sequence[tuple[str, str]], question: str) -> str:
    """Return the query to search for.

    Args:
        turns: Role and text of the messages before the question, oldest first.
        question: What the user asks now.

    Returns:
        The question, and after it the words of earlier turns to which it refers. At most
        MAX_QUERY_CHARS long.
    """
    query = condense(question)
    if not refers_back(query):
        return query
    added = _terms(turns, set(map(str.lower, _WORD.findall(query))))
    # The words come last: if the query is too long for the embedder, the question counts more.
    room = MAX_QUERY_CHARS - len(query) - 1
    suffix = " ".join(added)[: max(0, room)].rstrip()
    return f"{query} {suffix}" if suffix else query


def refers_back(question: str) -> bool:
    """Whether a question cannot be understood without the turns before it."""
    words = [word.lower() for word in _WORD.findall(question)]
    if not words:
        return False
    if _STARTS.match(question) or len(_own_words(question)) <= FEW_WORDS:
        return True
    # "Is there a limit" refers to nothing.
    text = _EXISTENCE.sub(" ", question)
    return any(word.lower() in _PRONOUNS for word in _WORD.findall(text))


def condense(text: str) -> str:
    """Shorten a text to MAX_QUERY_CHARS: its beginning and its end, where questions are."""
    if len(text) <= MAX_QUERY_CHARS:
        return text
    half = MAX_QUERY_CHARS // 2 - 1
    start, end = text[:half].rsplit(None, 1), text[-half:].split(None, 1)
    return f"{start[0] if start else ''} {end[-1] if end else ''}".strip()


def _own_words(text: str) -> list[str]:
    """Return the words of a text that say what it is about."""
    found = _WORD.findall(text)
    return [word for word in found if word.lower() not in _NOT_OWN]


def _terms(turns: Sequence[tuple[str, str]], known: set[str]) -> list[str]:
    """Return the words to add, those of the newest turns first.

    It reads back to the user's last question that stands alone. An answer counts with its names
    only, because its other words are the document's and would find the same passage again.
    """
    terms: list[str] = []
    for role, whole_text in reversed(turns[-MAX_TURNS:]):
        text = whole_text[:MAX_TURN_CHARS]
        found = _own_words(text) if role == "user" else list(_names(text))
        for word in found:
            if len(terms) < MAX_TERMS and word.lower() not in known:
                known.add(word.lower())
                terms.append(word)
        if role == "user" and not refers_back(text):
            break
    return terms


def _names(text: str) -> Iterator[str]:
    """Yield words that look like names: capitals inside of a sentence, digits and hyphens."""
    last_end = 0
    for match in _WORD.finditer(text):
        word, before = match.group(), text[last_end : match.start()]
        last_end = match.end()
        if word.lower() in _NOT_OWN:
            continue
        is_first = match.start() == 0 or _begins_sentence(before)
        has_sign = any(c.isdigit() or c in "-_." for c in word)
        if has_sign or word[1:] != word[1:].lower() or (word[0].isupper() and not is_first):
            yield word


def _begins_sentence(before: str) -> bool:
    """Whether a word begins a sentence or a line, from the text between it and the last word."""
    mark = before.rstrip()
    space = before[len(mark) :]
    return "\n" in space or (bool(space) and mark.endswith(_SENTENCE_ENDS))
