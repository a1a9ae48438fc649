"""Our own assignment: as few bytes as a bound on the error that readers meet allows.

HA-RAG's shares are fixed, so its quality is whatever comes out. Here quality is given and the
shares come out. Each variant may be held in one of a few *grades*, whose sizes and errors were
measured. What is wanted is

    least   sum_i bytes_i * size(grade_i)
    so that sum_i w_i * error(grade_i) <= max_error,    w_i ~ accesses_i + prior

a multiple-choice knapsack. Only grades on the lower convex hull of (error, size) are used, finest
first, and steps down the hull are taken by bytes saved per error added, best first, until the next
one breaks the bound (or until everything fits into capacity_bytes). For the relaxed problem, where
the last step may be taken in part, that order is optimal (Sinha and Zoltners, "The multiple-choice
knapsack problem", 1979), so what is lost against the optimum is less than the bytes of one step.
A variant that is hardly read adds hardly any error, so the cold get coarse first and the hot stay
fine. The prior is what keeps those that were not read *yet* from being thought free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragcache_core.identity.variant import Codec, Precision
from ragcache_core.tiering.precision_assignment import (
    NATIVE,
    AccessObservation,
    K,
    Placement,
    PrecisionAssignment,
)


@dataclass(frozen=True, slots=True)
class Grade:
    """A way to hold a value, as measured.

    size: bytes as a share of the native value. error: what it does to the output of attention,
    relative to that output; 0 for a lossless one.
    """

    precision: Precision
    size: float
    error: float


NATIVE_GRADE = Grade(NATIVE, 1.0, 0.0)

PRIOR_ACCESSES = 0.5
"""What each variant is believed to be read beside the accesses that were counted. Of retrieved
passages about half of all reads are first ones (multihoprag in ../shared/data), so it is not 0."""


def _both(codec: Codec, size: float, error: float) -> Grade:
    return Grade(Precision(codec, codec), size, error)


GRADES = (
    _both(Codec.INT8, 0.5156, 0.0067),
    _both(Codec.E4M3, 0.5156, 0.0315),
    _both(Codec.E5M2, 0.5156, 0.0677),
    _both(Codec.GSE8, 0.5020, 0.1210),
    Grade(Precision(Codec.INT8, Codec.INT4), 0.3984, 0.0820),
    _both(Codec.INT4, 0.2812, 0.1146),
)
"""As ``bench/hotness.py`` measures them: errors on the bundled model's KV, sizes of bfloat16 with
heads of 64 numbers. Another model has other errors; its own table is to be passed in."""

MAX_ERROR = 0.02
"""Default bound: 2 % of attention's output, as a read meets it on average."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Room in each of the memories that a placement may use; the rest is on disk."""

    gpu_bytes: int = 0
    pinned_bytes: int = 0
    pageable_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ScoreAssignment(PrecisionAssignment):
    """Precision under a quality bound, placement by score.

    grades: measured; native is always one of them. max_error: bound of the mean error that a read
    meets. capacity_bytes: stop where everything fits, and keep the rest fine; None: save all that
    the bound allows.
    """

    grades: tuple[Grade, ...] = GRADES
    max_error: float = MAX_ERROR
    memory: MemoryBudget = MemoryBudget()
    capacity_bytes: int | None = None
    prior_accesses: float = PRIOR_ACCESSES

    def assign_precisions(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Precision]:
        """The coarsest grades that the bound allows, the coldest first.

        Error that a variant already has is charged before any more is taken on. What such a
        variant deserves is said as if it could be had: the steps it would take at the final price.
        """
        if not observations:
            return {}
        by_name = sorted(observations, key=lambda one: one.key)
        hull = convex_hull((NATIVE_GRADE, *self.grades))
        steps = _Steps(by_name, hull, self.prior_accesses)
        reached = np.array([self._level(hull, one.held) for one in by_name])
        rows, levels = np.nonzero(np.arange(len(hull) - 1) >= reached[:, None])
        # Best first; those alike level by level, and by name.
        best_first = np.lexsort((rows, levels, -steps.ratio[rows, levels]))
        rows, levels = rows[best_first], levels[best_first]

        added = steps.error_added[rows, levels]
        error = steps.error_at(reached) + np.cumsum(added)
        over = (error > self.max_error) & (added > 0)
        if self.capacity_bytes is not None:
            saved = steps.bytes_saved[rows, levels]
            over |= steps.bytes_at(reached) - (np.cumsum(saved) - saved) <= self.capacity_bytes
        taken = int(np.argmax(over)) if over.any() else len(over)
        # What saves less than this, in bytes per error, is not taken.
        price = steps.ratio[rows[taken], levels[taken]] if taken < len(over) else 0.0
        np.maximum.at(reached, rows[:taken], levels[:taken] + 1)
        # Steps get less worth one by one, so these are the first few of each variant.
        worth = np.count_nonzero(steps.ratio >= price, axis=1)
        wanted = np.minimum(reached, worth).tolist()
        return {one.key: hull[level].precision for one, level in zip(by_name, wanted, strict=True)}

    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        """The best score first into the fastest memory that has room for it."""
        sizes = {grade.precision: grade.size for grade in (NATIVE_GRADE, *self.grades)}
        assigned = self.assign_precisions(observations)
        room = {
            Placement.GPU: self.memory.gpu_bytes,
            Placement.PINNED: self.memory.pinned_bytes,
            Placement.PAGEABLE: self.memory.pageable_bytes,
        }
        placed = {}
        for one in sorted(observations, key=lambda one: (-one.score, -one.accesses, one.key)):
            size = round(one.native_bytes * sizes[assigned[one.key]])
            placed[one.key] = Placement.DISK
            for memory, left in room.items():
                if size <= left:
                    room[memory] -= size
                    placed[one.key] = memory
                    break
        return placed

    def _level(self, hull: Sequence[Grade], held: Precision) -> int:
        """Where on the hull a variant stands that is held so; one not measured counts as fine."""
        errors = {grade.precision: grade.error for grade in self.grades}
        error = errors.get(held, 0.0)
        return next(
            (level for level, grade in enumerate(hull) if grade.error >= error), len(hull) - 1
        )


def convex_hull(grades: Sequence[Grade]) -> list[Grade]:
    """Grades worth using, finest first: each step saves less per error than the one before."""
    hull: list[Grade] = []
    for grade in sorted(grades, key=lambda grade: (grade.error, grade.size)):
        if hull and grade.size >= hull[-1].size:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], grade):
            hull.pop()
        hull.append(grade)
    return hull


def read_weights(
    observations: Sequence[AccessObservation[K]], prior_accesses: float = PRIOR_ACCESSES
) -> Mapping[K, float]:
    """The share of reads expected of each variant; alike for all where nothing was read."""
    total = sum(one.accesses + prior_accesses for one in observations)
    if total <= 0:
        return dict.fromkeys((one.key for one in observations), 1 / max(1, len(observations)))
    return {one.key: (one.accesses + prior_accesses) / total for one in observations}


def read_error(
    observations: Sequence[AccessObservation[K]],
    assigned: Mapping[K, Precision],
    grades: Sequence[Grade],
    prior_accesses: float = PRIOR_ACCESSES,
) -> float:
    """The mean error that a read is expected to meet under an assignment."""
    errors = {grade.precision: grade.error for grade in (NATIVE_GRADE, *grades)}
    weights = read_weights(observations, prior_accesses)
    return sum(weights[one.key] * errors[assigned[one.key]] for one in observations)


def _slope(fine: Grade, coarse: Grade) -> float:
    added = coarse.error - fine.error
    return (fine.size - coarse.size) / added if added > 0 else float("inf")


class _Steps:
    """Every step of every variant down the hull: arrays of [variants, grades - 1].

    bytes_saved and error_added: by the step; ratio: of the two, infinite where nothing is added.
    """

    def __init__(
        self,
        observations: Sequence[AccessObservation[K]],
        hull: Sequence[Grade],
        prior_accesses: float,
    ) -> None:
        weights = read_weights(observations, prior_accesses)
        self._weights = np.array([weights[one.key] for one in observations])
        self._bytes = np.array([float(one.native_bytes) for one in observations])
        self._sizes = np.array([grade.size for grade in hull])
        self._errors = np.array([grade.error for grade in hull])
        self.bytes_saved = self._bytes[:, None] * -np.diff(self._sizes)
        self.error_added = self._weights[:, None] * np.diff(self._errors)
        self.ratio = np.full(self.bytes_saved.shape, np.inf)
        with np.errstate(over="ignore"):  # next to nothing is added: infinite too
            np.divide(self.bytes_saved, self.error_added, self.ratio, where=self.error_added > 0)

    def error_at(self, levels: NDArray[np.intp]) -> float:
        """The error that a read meets with each variant at its level."""
        return float(self._weights @ self._errors[levels])

    def bytes_at(self, levels: NDArray[np.intp]) -> float:
        """The bytes that all take with each variant at its level."""
        return float(self._bytes @ self._sizes[levels])
