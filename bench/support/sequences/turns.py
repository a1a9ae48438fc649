"""When each contestant is asked, and when the requests of a turn arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """The time in which one contestant is asked, with the indices of its requests."""

    contestant: str
    requests: range


def turns(contestants: Sequence[str], requests: range, block: int) -> Iterator[list[Turn]]:
    """Yield the turns of each block of requests. In a block every contestant gets one turn.

    The order rotates with each block and reverses after each full rotation. A slow minute of the
    machine then affects all contestants alike.

    Args:
        contestants: Their names.
        requests: Indices of the requests to ask.
        block: Requests of a turn.
    """
    count = len(contestants)
    for number, first in enumerate(range(requests.start, requests.stop, block)):
        shift, reverse = number % count, number // count % 2
        order = [*contestants[shift:], *contestants[:shift]]
        if reverse:
            order.reverse()
        asked = range(first, min(first + block, requests.stop))
        yield [Turn(contestant, asked) for contestant in order]


def poisson_arrivals(num_requests: int, requests_per_s: float, seed: int) -> list[float]:
    """Return arrival times in seconds after the start of a turn, ascending from 0."""
    rng = random.Random(seed)
    now_s, arrivals_s = 0.0, []
    for _ in range(num_requests):
        arrivals_s.append(now_s)
        now_s += rng.expovariate(requests_per_s)
    return arrivals_s
