"""KL divergence of two first-token distributions, of which only the likeliest tokens are known."""

from __future__ import annotations

import math
from collections.abc import Mapping


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
