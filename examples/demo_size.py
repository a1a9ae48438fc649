"""How much of the demo fits into its time on this machine.

A processor without fast instructions computes the demo's prompts ten times as long as another one.
So the demo measures a short prompt first, and then asks fewer questions of fewer passages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

LIMIT_S: Final = 330.0
"""Time of the whole demo after the set-up. It is below six minutes, because times vary."""
FIRST_S: Final = 120.0
"""Time until the first answer, if the machine can."""
_LEAST_FIRST_S: Final = 15.0
"""Time that the first answer may take in any case."""
PAUSE_S: Final = 1.0
"""Between questions, as a person would: the engine saves a prompt's KV after its answer."""
INGEST_S: Final = 60.0
"""Longest ingest of all documents. If it would take longer, only a few are ingested."""
_FEW_S: Final = 5.0
"""Time of ingesting these few."""
_EXACT_SHARE: Final = 0.2
_BLEND_SHARE: Final = 0.5
"""Time to the first token with exact reuse and with a blend, as a share of that without."""
_GROWTH: Final = 1.2
"""A token of a long prompt takes longer than one of a short prompt, because it attends to more."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What the machine takes.

    Args:
        passage_s: Seconds of computing one passage of a prompt.
        answer_s: Seconds of one answer after its first token.
        start_s: Seconds until the engine has loaded the model.
    """

    passage_s: float
    answer_s: float
    start_s: float

    def first_token_s(self, top_k: int) -> float:
        """Return the seconds to the first token of a prompt that is computed."""
        return self.passage_s * top_k * _GROWTH


@dataclass(frozen=True, slots=True)
class DemoSize:
    """How many questions the demo asks, and how many passages each prompt has.

    Args:
        num_restarts: With one restart of the engine, blends follow in the same engine.
    """

    num_questions: int
    top_k: int
    num_restarts: int = 1

    def seconds(self, speed: Speed) -> float:
        """Return how long all questions and the restarts of the engine take."""
        computed_s = speed.first_token_s(self.top_k)
        answered_s = speed.answer_s + PAUSE_S
        cold_s = computed_s + answered_s
        exact_s = _EXACT_SHARE * computed_s + answered_s
        # Each pair is asked twice: with a blend, and then without reuse.
        pair_s = (1 + _BLEND_SHARE) * computed_s + 2 * answered_s
        num_pairs = len(pairs([str(number) for number in range(self.num_questions)]))
        return (
            self.num_questions * (cold_s + exact_s)
            + num_pairs * pair_s
            + self.num_restarts * (speed.start_s + speed.first_token_s(1))
        )


SIZES: Final = (
    DemoSize(6, 7, num_restarts=2),
    DemoSize(4, 5, num_restarts=2),
    DemoSize(4, 4),
    DemoSize(3, 3),
    DemoSize(2, 3),
    DemoSize(2, 2),
)
"""From the largest, which a processor with fast instructions gets."""


def largest_size(speed: Speed, elapsed_s: float) -> DemoSize:
    """Return the largest size whose first answer and end come in time, or the smallest one.

    Args:
        elapsed_s: Seconds since the demo began.
    """
    first_s = max(_LEAST_FIRST_S, FIRST_S - elapsed_s)
    fitting = (
        size
        for size in SIZES
        if size.seconds(speed) <= LIMIT_S - elapsed_s
        and speed.first_token_s(size.top_k) + speed.answer_s <= first_s
    )
    return next(fitting, SIZES[-1])


def fitting_count(sizes_bytes: Sequence[int], bytes_per_s: float) -> int:
    """Return how many of the documents to ingest: all, or the first ones that take a short time."""
    ends_s = [num_bytes / bytes_per_s for num_bytes in itertools.accumulate(sizes_bytes)]
    if not ends_s or ends_s[-1] <= INGEST_S:
        return len(ends_s)
    return sum(end_s <= _FEW_S for end_s in ends_s)


def pairs(questions: Sequence[str]) -> list[str]:
    """Return each question together with another one, so that chunks of both are retrieved."""
    half = len(questions) // 2
    apart = zip(questions[:half], questions[half:], strict=False)
    together = zip(questions[::2], questions[1::2], strict=False)
    return list(dict.fromkeys(f"{later} {first}" for first, later in (*apart, *together)))


def asked_about(names: Iterable[str], questions: Sequence[str]) -> list[str]:
    """Return the names of documents that a question has, such as ``csv`` or ``shutil``."""
    words = {word.strip("?.,").casefold() for text in questions for word in text.split()}
    return [name for name in names if set(name.casefold().replace("_", " ").split()) <= words]
