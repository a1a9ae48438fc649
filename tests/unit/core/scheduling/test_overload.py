"""Admission under overload, with a simulated engine whose times are exact: no clock runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ragcache_core.scheduling.admission import LatencyForecast, LatencyLimits, judge
from ragcache_core.scheduling.decode_pace import DecodePace

PREFILL_S, ANSWER_S, TOKEN_S = 1.0, 10.0, 0.01
MOST_ANSWERS = 5
LIMITS = LatencyLimits(first_token_s=30.0, next_token_s=(MOST_ANSWERS + 0.5) * TOKEN_S)
STEP_S = 0.25
"""A request comes in every step: eight times as many as the engine can answer."""
NUM_STEPS = 4000


@dataclass
class SimulatedEngine:
    """Computes one prompt at a time, and generates all answers at once."""

    now_s: float = 0.0
    pending: list[float] = field(default_factory=list)  # arrivals
    ends: list[float] = field(default_factory=list)  # of the answers
    prefilled_s: float = 0.0  # of the first prompt
    waits_s: list[float] = field(default_factory=list)
    most_answers: int = 0
    num_answered: int = 0

    def step(self) -> None:
        self.now_s += STEP_S
        self.num_answered += sum(end <= self.now_s for end in self.ends)
        self.ends = [end for end in self.ends if end > self.now_s]
        if self.pending:
            self.prefilled_s += STEP_S
        if self.prefilled_s >= PREFILL_S:
            self.prefilled_s = 0.0
            self.waits_s.append(self.now_s - self.pending.pop(0))
            self.ends.append(self.now_s + ANSWER_S)
        self.most_answers = max(self.most_answers, len(self.ends))


def overload(num_later: Callable[[DecodePace, SimulatedEngine], float]) -> SimulatedEngine:
    """Admit what keeps the limits, for as long as the simulation lasts.

    Args:
        num_later: Returns how many answers are expected when a new request begins.
    """
    pace = DecodePace()
    for number in (1, 2, 4, 8) * 4:
        pace.observe(number, number * TOKEN_S, ANSWER_S)
    engine = SimulatedEngine()
    for _ in range(NUM_STEPS):
        engine.step()
        queue_s = len(engine.pending) * PREFILL_S - engine.prefilled_s
        token_s = pace.token_s(num_later(pace, engine) + 1)
        forecast = LatencyForecast(0.0, queue_s, PREFILL_S, token_s)
        if judge(forecast, LIMITS) is None:
            engine.pending.append(engine.now_s)
    return engine


def test_the_engine_is_full_and_what_it_accepts_keeps_the_limits() -> None:
    engine = overload(
        lambda pace, engine: pace.num_after(
            len(engine.ends), len(engine.pending), len(engine.pending) * PREFILL_S
        )
    )
    assert LIMITS.first_token_s is not None
    assert max(engine.waits_s) <= LIMITS.first_token_s
    assert engine.most_answers <= MOST_ANSWERS + 1
    most = NUM_STEPS * STEP_S / ANSWER_S * MOST_ANSWERS
    assert engine.num_answered >= 0.85 * most


def test_by_the_present_answers_alone_too_many_come_at_once() -> None:
    engine = overload(lambda _, engine: len(engine.ends))
    assert engine.most_answers > 1.5 * MOST_ANSWERS
