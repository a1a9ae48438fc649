"""ROUGE-L: how alike two answers are, by the words that both have in one order (Lin 2004)."""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, kana and Han, which are written without spaces between words."""

_WORD = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """What ``rouge_l`` compares: words between spaces, or characters where there are no spaces."""
    return _WORD.findall(text)


def rouge_l(found: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words, in [0, 1]; 1 of two answers without any."""
    if not found or not wanted:
        return float(list(found) == list(wanted))
    lengths = [0] * (len(wanted) + 1)
    for word in found:
        diagonal = 0
        for i, other in enumerate(wanted, 1):
            diagonal, lengths[i] = (
                lengths[i],
                diagonal + 1 if word == other else max(lengths[i], lengths[i - 1]),
            )
    common = lengths[-1]
    return 2 * common / (len(found) + len(wanted))
