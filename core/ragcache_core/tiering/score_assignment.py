"""Assigns as few bytes as a bound on the mean read error allows.

HA-RAG fixes the shares and accepts the resulting quality. Here the quality is fixed and the shares
result. Each variant may be stored in one of a few *grades*, whose sizes and errors were measured.
The problem is a multiple-choice knapsack:

    minimize   sum_i bytes_i * size(grade_i)
    such that  sum_i w_i * error(grade_i) <= max_error,    w_i ~ accesses_i + prior

Only grades on the lower convex hull of (error, size) are used, finest first. Steps down the hull
are taken by bytes saved per added error, best first, until the next step exceeds the bound (or
until everything fits into capacity_bytes). For the relaxed problem, where the last step may be
taken in part, this order is optimal. So the loss against the optimum is less than the bytes of one
step.

A variant that is hardly read adds hardly any error, so rarely read variants become coarse first and
often read ones stay fine. The prior prevents variants that have not been read *yet* from counting
as free.

Source: Sinha and Zoltners, "The multiple-choice knapsack problem", 1979.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragcache_core.identity.variant import Precision
from ragcache_core.tiering.precision_assignment import (
    NATIVE,
    AccessObservation,
    K,
    Placement,
    PrecisionAssignment,
)


@dataclass(frozen=True, slots=True)
class Grade:
    """A way to store a value, as measured.

    Attributes:
        size: Bytes as a share of the native value.
        error: Error of its numbers, relative to these numbers. 0: lossless.
    """

    precision: Precision
    size: float
    error: float


NATIVE_GRADE = Grade(NATIVE, 1.0, 0.0)

PRIOR_ACCESSES = 0.5
"""Expected reads of each variant, in addition to the counted ones.

About half of all reads of retrieved passages are first reads (MultiHop-RAG), so it is not 0.
"""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Capacity of each memory that a placement may use. The rest is stored on disk."""

    gpu_bytes: int = 0
    pinned_bytes: int = 0
    pageable_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ScoreAssignment(PrecisionAssignment):
    """Precision under an error bound, placement by score.

    Attributes:
        grades: Measured grades. Native is always one of them.
        max_error: Bound of the mean error of a read.
        memory: Capacities for the placement.
        capacity_bytes: Stop once everything fits. None: save as much as the bound allows.
    """

    grades: tuple[Grade, ...]
    max_error: float
    memory: MemoryBudget = MemoryBudget()
    capacity_bytes: int | None = None
    prior_accesses: float = PRIOR_ACCESSES

    def assign_precisions(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Precision]:
        """Return the coarsest grades within the bound, least accessed variants first.

        Errors that stored variants already have are counted first. The result for such a variant
        ignores that: it contains the steps that the variant would take at the final ratio.
        """
        if not observations:
            return {}
        by_key = sorted(observations, key=lambda one: one.key)
        hull = convex_hull((NATIVE_GRADE, *self.grades))
        steps = _Steps(by_key, hull, self.prior_accesses)
        reached = np.array([self._level(hull, one.precision) for one in by_key])
        rows, levels = np.nonzero(np.arange(len(hull) - 1) >= reached[:, None])
        # Best first. Ties are ordered by level and key.
        best_first = np.lexsort((rows, levels, -steps.ratio[rows, levels]))
        rows, levels = rows[best_first], levels[best_first]

        added = steps.error_added[rows, levels]
        error = steps.error_at(reached) + np.cumsum(added)
        is_over = (error > self.max_error) & (added > 0)
        if self.capacity_bytes is not None:
            saved = steps.bytes_saved[rows, levels]
            is_over |= steps.bytes_at(reached) - (np.cumsum(saved) - saved) <= self.capacity_bytes
        taken = int(np.argmax(is_over)) if is_over.any() else len(is_over)
        # Steps with a lower ratio of saved bytes to added error are not taken.
        min_ratio = steps.ratio[rows[taken], levels[taken]] if taken < len(is_over) else 0.0
        np.maximum.at(reached, rows[:taken], levels[:taken] + 1)
        # The ratios of a variant descend, so these are its first steps.
        num_steps = np.count_nonzero(steps.ratio >= min_ratio, axis=1)
        levels_by_key = np.minimum(reached, num_steps).tolist()
        return {
            one.key: hull[level].precision for one, level in zip(by_key, levels_by_key, strict=True)
        }

    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        """Assign the best scores first to the fastest memory with enough room."""
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

    def _level(self, hull: Sequence[Grade], precision: Precision) -> int:
        """Return the index on the hull of a stored precision.

        An unmeasured one counts as finest.
        """
        errors = {grade.precision: grade.error for grade in self.grades}
        error = errors.get(precision, 0.0)
        return next(
            (level for level, grade in enumerate(hull) if grade.error >= error), len(hull) - 1
        )


def convex_hull(grades: Sequence[Grade]) -> list[Grade]:
    """Return the useful grades, finest first.

    Each step saves fewer bytes per added error than the step before.
    """
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
    """Return the expected share of reads of each variant; equal shares if nothing was read."""
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
    """Return the expected mean error of a read under an assignment."""
    errors = {grade.precision: grade.error for grade in (NATIVE_GRADE, *grades)}
    weights = read_weights(observations, prior_accesses)
    return sum(weights[one.key] * errors[assigned[one.key]] for one in observations)


def _slope(fine: Grade, coarse: Grade) -> float:
    added = coarse.error - fine.error
    return (fine.size - coarse.size) / added if added > 0 else float("inf")


class _Steps:
    """All steps of all variants down the hull: arrays of [variants, grades - 1].

    Attributes:
        bytes_saved: By each step.
        error_added: By each step.
        ratio: Of both, infinite where no error is added.
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
        with np.errstate(over="ignore"):  # a tiny added error counts as infinite too
            np.divide(self.bytes_saved, self.error_added, self.ratio, where=self.error_added > 0)

    def error_at(self, levels: NDArray[np.intp]) -> float:
        """Return the mean read error with each variant at its level."""
        return float(self._weights @ self._errors[levels])

    def bytes_at(self, levels: NDArray[np.intp]) -> float:
        """Return the total bytes with each variant at its level."""
        return float(self._bytes @ self._sizes[levels])
