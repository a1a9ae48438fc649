"""Makes questions from a collection's own texts, whose answers are known.

One sentence is held out of a text and becomes the question. The rest of the text is what a search
for it has to find. The question's words are not in that text because they were copied there.

Source: Lee, Chang and Toutanova, Latent retrieval for weakly supervised open domain question
answering (2019), inverse cloze task.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MIN_SENTENCES = 3
MIN_WORDS = 6
MAX_WORDS = 40

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class HeldOutQuestion:
    """A sentence of a text, and the text without it."""

    question: str
    rest: str


def held_out_question(text: str) -> HeldOutQuestion | None:
    """Return the middle one of the suitable sentences of a text, or None if it has none."""
    sentences = [part.strip() for part in _SENTENCE_END.split(text) if part.strip()]
    suitable = [
        i
        for i, sentence in enumerate(sentences)
        if MIN_WORDS <= len(_WORD.findall(sentence)) <= MAX_WORDS
    ]
    if len(sentences) < MIN_SENTENCES or not suitable:
        return None
    held_out = suitable[len(suitable) // 2]
    rest = sentences[:held_out] + sentences[held_out + 1 :]
    return HeldOutQuestion(" ".join(sentences[held_out].split()), "\n".join(rest))
