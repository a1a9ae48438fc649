"""Turns of contestants that are compared, and intervals by bootstrap, paired between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVEL = 0.95

Indices = NDArray[np.int64]


def interval(
    statistic: Callable[[Indices], float], num_requests: int, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a statistic of resampled requests.

    Args:
        statistic: From indices of requests, with repetition, to a figure. All contestants that it
            compares are read at the same indices, which pairs them.
        num_requests: Number of measured requests, at least 1.
        seed: Seed of the resampling.
    """
    rng = np.random.default_rng(seed)
    figures = [
        statistic(rng.integers(0, num_requests, num_requests, dtype=np.int64))
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(figures, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mean_ratio(over: NDArray[Any], under: NDArray[Any]) -> Callable[[Indices], float]:
    """Return the statistic mean(over) / mean(under).

    Args:
        over: Times of each request, in the last axis. A first axis has several measurements.
        under: Times of each request.
    """
    return lambda indices: float(over[..., indices].mean() / under[indices].mean())


def quantile_ratio(
    over: NDArray[Any], under: NDArray[Any], quantile: float
) -> Callable[[Indices], float]:
    """Return the statistic of the quotient of both quantiles. Arguments: see ``mean_ratio``.

    Several measurements are pooled: their mean would have fewer slow requests than each of them.
    """
    return lambda indices: float(
        np.quantile(over[..., indices], quantile) / np.quantile(under[indices], quantile)
    )


SLOWER = 1.05
"""Quotient of times from which a request counts as slower."""


def slower_share(
    times: NDArray[Any], plain: NDArray[Any], plain_again: NDArray[Any] | None
) -> Callable[[Indices], float]:
    """Return the share of requests more than 5 % slower than plain, less that of plain itself.

    With a second plain contestant both serve as the reference, and each is compared with the
    other for the noise floor. Without one nothing is subtracted.
    """
    if plain_again is None:
        slower = (times > SLOWER * plain).astype(float)
    else:
        slower = (_slower(times, plain) + _slower(times, plain_again)) / 2
        slower -= (_slower(plain, plain_again) + _slower(plain_again, plain)) / 2
    return lambda indices: float(slower[indices].mean())


def _slower(times: NDArray[Any], reference: NDArray[Any]) -> NDArray[np.float64]:
    return (times > SLOWER * reference).astype(np.float64)


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
