"""What became of loads, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragcache_engine.transfer import LoadOutcome

EXACT, BLENDED, REPAIRED = "exact", "blended", "repaired"


@dataclass(slots=True)
class LoadCounts:
    """Of some loads that ended.

    tokens: by kind: EXACT, BLENDED (not exact, and left as they were), REPAIRED (computed anew).
    failures: of loads, by reason. load_s, repair_s: seconds of each load, and of each repair.
    """

    tokens: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    load_s: list[float] = field(default_factory=list)
    repair_s: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.load_s)

    def add(self, outcome: LoadOutcome) -> None:
        """Count one more."""
        self.tokens[EXACT] += outcome.tokens - outcome.blended
        self.tokens[BLENDED] += max(0, outcome.blended - outcome.repaired)
        self.tokens[REPAIRED] += outcome.repaired
        if outcome.reason:
            self.failures[outcome.reason] += 1
        self.load_s.append(outcome.seconds)
        if outcome.repair_s:
            self.repair_s.append(outcome.repair_s)

    def __add__(self, other: LoadCounts) -> LoadCounts:
        return LoadCounts(
            self.tokens + other.tokens,
            self.failures + other.failures,
            self.load_s + other.load_s,
            self.repair_s + other.repair_s,
        )

    def to_dict(self) -> dict[str, Any]:
        """In plain types, which cross processes; ``from_dict`` reads it back."""
        return {
            "tokens": dict(self.tokens),
            "failures": dict(self.failures),
            "load_s": list(self.load_s),
            "repair_s": list(self.repair_s),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> LoadCounts:
        """Of nothing where nothing is there."""
        return cls(
            Counter(value.get("tokens", {})),
            Counter(value.get("failures", {})),
            list(value.get("load_s", ())),
            list(value.get("repair_s", ())),
        )

    def summary(self) -> dict[str, int | float]:
        """What is worth a line of log."""
        return {
            "loads": len(self.load_s),
            **{f"{kind} tokens": count for kind, count in sorted(self.tokens.items()) if count},
            **{f"failed, {reason}": count for reason, count in sorted(self.failures.items())},
            "load seconds": round(sum(self.load_s), 3),
            "repair seconds": round(sum(self.repair_s), 3),
        }
