"""How similar a blended answer is to a full one.

ROUGE-L compares the words of two answers by their longest common subsequence (Lin 2004). The KL
divergence compares the distributions of their first tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

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


def first_token_kl(full: Mapping[str, float], blended: Mapping[str, float]) -> float:
    """Return KL(full || blended) in nats over the likeliest tokens of ``full``.

    A token that ``blended`` does not list is at most as likely as its least likely one. So the
    result is rather too low for distributions that differ much.

    Args:
        full: Log probabilities of the likeliest tokens. Not empty.
        blended: The same of another distribution. Not empty.
    """
    floor = min(blended.values())
    terms = (math.exp(log_p) * (log_p - blended.get(token, floor)) for token, log_p in full.items())
    return max(0.0, math.fsum(terms))
