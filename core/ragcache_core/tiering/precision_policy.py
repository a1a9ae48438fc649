"""The precisions that a platform gives to the variants of its store, as its users set them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ragcache_core.identity.variant import Precision
from ragcache_core.tiering.precision_assignment import NATIVE

MAX_GRADES = 4
"""Algorithm 1 of HA-RAG has four schemes."""

DEFAULT_MAX_ERROR = 0.02
"""Mean error of the numbers that engines load, relative to these numbers."""


class Scheme(StrEnum):
    """What decides the precision of a variant."""

    HARAG = "harag"  # its rank by reads (HA-RAG, Algorithm 1)
    SCORE = "score"  # the bytes that it saves by the error that readers meet


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """The grades of a store, and what assigns them.

    Attributes:
        grades: Precisions for the most read variants first. Without any, all are native.
        shares: For HARAG, the share of variants of each grade but the last one.
        max_error: For SCORE, the bound of the mean error of what engines load.
    """

    scheme: Scheme = Scheme.HARAG
    grades: tuple[Precision, ...] = (NATIVE,)
    shares: tuple[float, ...] = ()
    max_error: float = DEFAULT_MAX_ERROR

    def __post_init__(self) -> None:
        if not 1 <= len(self.grades) <= MAX_GRADES:
            raise ValueError(f"{len(self.grades)} grades, not 1 to {MAX_GRADES}")
        wanted = len(self.grades) - 1 if self.scheme is Scheme.HARAG else 0
        if len(self.shares) != wanted:
            raise ValueError(f"{len(self.shares)} shares, not {wanted}")
        if not all(0 < share < 1 for share in self.shares) or sum(self.shares) >= 1:
            raise ValueError("the shares are not above 0, or leave nothing to the last grade")
        if not 0 < self.max_error <= 1:
            raise ValueError("max_error is not above 0 and at most 1")

    @property
    def encodings(self) -> tuple[Precision, ...]:
        """The precisions that values are encoded in, once each."""
        return tuple(one for one in dict.fromkeys(self.grades) if one != NATIVE)

    @property
    def lossy(self) -> tuple[Precision, ...]:
        """The precisions that lose information, once each."""
        return tuple(one for one in self.encodings if not one.lossless)

    def __str__(self) -> str:
        """Return the policy as a JSON object, which ``parse`` reads."""
        return json.dumps(
            {
                "scheme": self.scheme.value,
                "grades": [str(one) for one in self.grades],
                "shares": list(self.shares),
                "max_error": self.max_error,
            }
        )

    @classmethod
    def parse(cls, text: str) -> PrecisionPolicy:
        """Parse a JSON object.

        Raises:
            ValueError: It is no JSON, a name is unknown, or the shares do not fit the grades.
        """
        fields = json.loads(text)
        if not isinstance(fields, Mapping) or not fields.keys() <= set(cls.__slots__):
            raise ValueError("not an object with the fields of a policy")
        default = cls()
        return cls(
            Scheme(fields.get("scheme", default.scheme)),
            tuple(Precision.parse(str(one)) for one in _items(fields.get("grades", ["native"]))),
            tuple(float(one) for one in _items(fields.get("shares", []))),
            float(fields.get("max_error", default.max_error)),
        )


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, list):
        return value
    raise ValueError("not a list")
