"""ROUGE-L: similarity of two answers by their longest common subsequence of words.

Source: Lin 2004.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, kana and Han, which are written without spaces between words."""

_WORD = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """Split text at spaces, or into characters in scripts without spaces."""
    return _WORD.findall(text)


def rouge_l(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Return the F1 of the longest common subsequence of words, in [0, 1].

    Two answers without words have 1.
    """
    if not answer or not reference:
        return float(list(answer) == list(reference))
    lengths = [0] * (len(reference) + 1)
    for word in answer:
        diagonal = 0
        for i, other in enumerate(reference, 1):
            diagonal, lengths[i] = (
                lengths[i],
                diagonal + 1 if word == other else max(lengths[i], lengths[i - 1]),
            )
    common = lengths[-1]
    return 2 * common / (len(answer) + len(reference))
