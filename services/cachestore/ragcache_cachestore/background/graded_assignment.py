"""Assigns the grades that users have set, by ranks or by the errors that the store measures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ragcache_cachestore.state.catalog import CatalogVariant
from ragcache_core.identity.variant import Precision, ValueShape
from ragcache_core.tiering.precision_assignment import (
    NATIVE,
    AccessObservation,
    HaRagAssignment,
    K,
    Placement,
    PrecisionAssignment,
)
from ragcache_core.tiering.precision_policy import PrecisionPolicy, Scheme
from ragcache_core.tiering.score_assignment import Grade, MemoryBudget, ScoreAssignment
from ragcache_kv.codecs import decode_part, encode_part
from ragcache_kv.codecs.numbers import NUMBERS, Bytes, Floats, widen
from ragcache_kv.values.buffers import checksummed_parts

NUM_SAMPLES = 8
MAX_UNUSABLE = 1024
"""Values on which the errors of grades are measured. The errors of one model differ little."""


class GradedAssignment(PrecisionAssignment):
    """Assigns the grades of a policy. Not thread-safe.

    Under scheme score, all values stay native until the errors of the grades are measured.

    Args:
        policy: Grades and scheme.
        memory_bytes: Size of the memory tier.
    """

    def __init__(self, policy: PrecisionPolicy, memory_bytes: int) -> None:
        self._policy = policy
        self._memory = MemoryBudget(pageable_bytes=memory_bytes)
        self._sums = {one: np.zeros(2) for one in policy.encodings}  # size and error
        self._samples: set[int] = set()
        self._unusable: set[int] = set()
        self._assignment: PrecisionAssignment = (
            HaRagAssignment(policy.grades, policy.shares)
            if policy.scheme is Scheme.HARAG
            else ScoreAssignment((), policy.max_error, self._memory)
        )

    @property
    def needs_samples(self) -> bool:
        """Whether errors of grades have to be measured."""
        is_score = self._policy.scheme is Scheme.SCORE
        return is_score and len(self._samples) < NUM_SAMPLES and bool(self._sums)

    def has_seen(self, identity: int) -> bool:
        """Tell whether a value has been measured, or cannot be."""
        return identity in self._samples or identity in self._unusable

    def add_sample(self, variant: CatalogVariant, shape: ValueShape, value: bytearray) -> None:
        """Measure the grades on a lossless value.

        A value that is damaged, does not decode or has numbers that are not finite is left out.
        """
        sizes = [part.num_bytes for part in variant.parts]
        checked = checksummed_parts(memoryview(value), sizes)
        if self.has_seen(variant.identity) or list(checked) != list(variant.parts):
            return
        try:
            found = self._measured(variant, shape, value, sizes)
        except ValueError:
            found = None
        if found is None or not all(math.isfinite(error) for _, error in found.values()):
            if len(self._unusable) < MAX_UNUSABLE:
                self._unusable.add(variant.identity)
            return
        for precision, sums in found.items():
            self._sums[precision] += sums
        self._samples.add(variant.identity)
        if not self.needs_samples:
            self._use_samples()

    def _measured(
        self, variant: CatalogVariant, shape: ValueShape, value: bytearray, sizes: Sequence[int]
    ) -> dict[Precision, tuple[float, float]]:
        """Return what each grade does to a value. Raises ValueError if it does not decode."""
        layers, start = [], 0
        for size in sizes:
            part = np.frombuffer(value, np.uint8)[start : start + size]
            layers.append(decode_part(part, shape, variant.info.num_tokens, variant.info.precision))
            start += size
        tokens = variant.info.num_tokens
        return {one: measure(layers, shape, tokens, one) for one in self._sums}

    @override
    def assign_precisions(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Precision]:
        if self.needs_samples:
            return dict.fromkeys((one.key for one in observations), NATIVE)
        return self._assignment.assign_precisions(observations)

    @override
    def assign_placements(self, observations: Sequence[AccessObservation[K]]) -> dict[K, Placement]:
        return self._assignment.assign_placements(observations)

    def _use_samples(self) -> None:
        count = len(self._samples)
        grades = [
            Grade(precision, float(size / count), float(error / count))
            for precision, (size, error) in self._sums.items()
        ]
        self._assignment = ScoreAssignment(tuple(grades), self._policy.max_error, self._memory)


def measure(
    layers: Sequence[Bytes], shape: ValueShape, num_tokens: int, precision: Precision
) -> tuple[float, float]:
    """Return what a precision does to a value.

    Args:
        layers: The native parts of the value.

    Returns:
        The size as a share of the native one, and the error: the root mean square of the change of
        numbers, over that of the numbers. It is that of keys or of values, whichever is larger.
    """
    encoded_bytes = 0
    changed, total = np.zeros(2), np.zeros(2)  # squares, of keys and of values
    number = NUMBERS[shape.dtype]
    for layer in layers:
        encoded = encode_part(layer, shape, num_tokens, precision)
        encoded_bytes += encoded.nbytes
        decoded = decode_part(encoded, shape, num_tokens, precision)
        before, after = (widen(one.view(number.bits), number) for one in (layer, decoded))
        changed += _squares(after - before)
        total += _squares(before)
    native_bytes = sum(layer.nbytes for layer in layers)
    errors = [math.sqrt(one / of) if of else 0.0 for one, of in zip(changed, total, strict=True)]
    return encoded_bytes / native_bytes, max(errors)


def _squares(numbers: Floats) -> NDArray[np.float64]:
    """Return the sums of squares of keys and of values."""
    halves = numbers.astype(np.float64).reshape(2, -1)
    return np.array([np.dot(half, half) for half in halves])
