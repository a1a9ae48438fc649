"""Admit or refuse a request by its predicted latency.

A request that cannot meet its limit is refused before it takes anything, so that the time of the
engines goes to requests that can. Nothing is refused on a guess: a forecast without measured costs
has no time, and admits.

Source: Mooncake Algorithm 1, lines 17 to 19, and section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

EARLY_RATIO: Final = 1.25
"""A request is refused before its search if the queue alone exceeds its limit by this factor. The
queue may become shorter in another way than predicted until the search has ended."""


class RefusalCode(StrEnum):
    """Why a request is not served now. It is the code of the error and a label of the metric."""

    POOL_FULL = "too_many_requests"  # as many are in flight as the gateway has memory for
    FIRST_TOKEN = "first_token_over_limit"  # predicted, of spec.gateway.slo
    NEXT_TOKEN = "next_token_over_limit"  # predicted, of spec.gateway.slo
    DEADLINE = "deadline_out_of_reach"  # predicted, of the request
    QUOTA = "quota_exceeded"  # of a key or a tenant
    CONCURRENCY = "too_many_at_once"
    DEADLINE_PASSED = "deadline_passed"  # while the request waited


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """What a request may take, in seconds. None: there is no limit.

    Attributes:
        first_token_s: From its arrival to its first token, for every request.
        next_token_s: From one token to the next.
        deadline_s: From its arrival to its first token, as the client has set it.
    """

    first_token_s: float | None = None
    next_token_s: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class LatencyForecast:
    """What a request is predicted to take at the engine of its plan, in seconds.

    Attributes:
        elapsed_s: Since its arrival.
        queue_s: From now until the engine can begin.
        work_s: From then to the first token: loads and prefill. None: nothing is known of the
            engine's costs.
        next_token_s: Between two tokens, with this request beside those that the engine generates
            now. None: it is not known.
        decode_wait_s: Until so many answers have ended that the next token keeps its limit.
    """

    elapsed_s: float
    queue_s: float = 0.0
    work_s: float | None = None
    next_token_s: float | None = None
    decode_wait_s: float = 0.0

    @property
    def first_token_s(self) -> float | None:
        """Predicted seconds from the arrival to the first token. None: it is not known."""
        return None if self.work_s is None else self.elapsed_s + self.queue_s + self.work_s


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request cannot keep a limit.

    Attributes:
        predicted_s: What it would take, in seconds.
        limit_s: What it may take.
        retry_after_s: When it could keep the limit, as far as that follows from the queue.
        fits_idle: Whether it would keep the limit in an engine without a queue.
    """

    reason: RefusalCode
    predicted_s: float
    limit_s: float
    retry_after_s: float
    fits_idle: bool


def judge(forecast: LatencyForecast, limits: LatencyLimits) -> Refusal | None:
    """Return why a request is refused, or None if it is admitted.

    Of two limits on the first token the lower one is named.
    """
    first_token_s = forecast.first_token_s
    if first_token_s is not None:
        exceeded = [
            (limit_s, reason)
            for limit_s, reason in (
                (limits.deadline_s, RefusalCode.DEADLINE),
                (limits.first_token_s, RefusalCode.FIRST_TOKEN),
            )
            if limit_s is not None and first_token_s > limit_s
        ]
        if exceeded:
            limit_s, reason = min(exceeded)
            excess_s = first_token_s - limit_s
            # The queue becomes shorter by a second in each second; the rest stays as it is.
            wait_s = min(excess_s, forecast.queue_s)
            return Refusal(
                reason, first_token_s, limit_s, wait_s, fits_idle=excess_s <= forecast.queue_s
            )
    next_token_s, limit_s = forecast.next_token_s, limits.next_token_s or 0.0
    if next_token_s is not None and limits.next_token_s is not None and next_token_s > limit_s:
        wait_s = forecast.decode_wait_s
        return Refusal(RefusalCode.NEXT_TOKEN, next_token_s, limit_s, wait_s, fits_idle=wait_s > 0)
    return None


def judge_early(elapsed_s: float, queue_s: float, limits: LatencyLimits) -> Refusal | None:
    """Return why a request is refused before its search, or None if it goes on.

    Args:
        elapsed_s: Since its arrival.
        queue_s: Of the engine with the shortest queue. The time of the search is part of it: it
            becomes shorter meanwhile.
    """
    refusal = judge(LatencyForecast(elapsed_s, queue_s, 0.0), limits)
    if refusal is None or refusal.predicted_s <= EARLY_RATIO * refusal.limit_s:
        return None
    return refusal
