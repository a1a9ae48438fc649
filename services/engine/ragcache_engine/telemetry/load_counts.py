"""What became of loads, and of plans that led to none, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragcache_engine.protocol.messages import LoadOutcome

EXACT, BLENDED, REPAIRED, COMPUTED = "exact", "blended", "repaired", "computed"


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Since they were asked for last, by the name of the tier.

    evicted: values that left it. held_bytes: in it now, where that has changed.
    """

    evicted: Mapping[str, int]
    held_bytes: Mapping[str, int]


@dataclass(slots=True)
class LoadCounts:
    """Of some loads that ended, and of passes.

    tokens: of prompts, by kind: EXACT, BLENDED (not exact, and left as they were), REPAIRED
    (computed anew before their request was taken up), COMPUTED (in vLLM's own prefill).
    failures: of loads, and of values that a load was mended without, by reason. load_s, repair_s:
    seconds of each load, and of each repair.
    refused: plans that were not acted on, by reason. values_from, bytes_from: values that were
    loaded and their bytes, by where they came from: a tier of the worker's, or the store. evicted:
    values that left a tier; held_bytes: of values in each now.
    """

    tokens: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    load_s: list[float] = field(default_factory=list)
    repair_s: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    values_from: Counter[str] = field(default_factory=Counter)
    bytes_from: Counter[str] = field(default_factory=Counter)
    evicted: Counter[str] = field(default_factory=Counter)
    held_bytes: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.load_s or self.tokens or self.refused or self.evicted or self.held_bytes)

    def add(self, outcome: LoadOutcome) -> None:
        """Count one more."""
        self.tokens[EXACT] += outcome.tokens - outcome.blended
        self.tokens[BLENDED] += max(0, outcome.blended - outcome.repaired)
        self.tokens[REPAIRED] += outcome.repaired
        if outcome.reason:
            self.failures[outcome.reason] += 1
        self.failures.update(outcome.why_lost)
        self.load_s.append(outcome.seconds)
        self.values_from.update(outcome.values_from)
        self.bytes_from.update(outcome.bytes_from)
        if outcome.repair_s:
            self.repair_s.append(outcome.repair_s)

    def add_pass(self, prompt_tokens: int) -> None:
        """Count tokens of prompts that a pass has computed."""
        if prompt_tokens:
            self.tokens[COMPUTED] += prompt_tokens

    def add_tiers(self, counts: TierCounts) -> None:
        """Count what became of values in the worker's own tiers."""
        self.evicted.update(counts.evicted)
        self.held_bytes.update(counts.held_bytes)

    def __add__(self, other: LoadCounts) -> LoadCounts:
        return LoadCounts(
            self.tokens + other.tokens,
            self.failures + other.failures,
            self.load_s + other.load_s,
            self.repair_s + other.repair_s,
            self.refused + other.refused,
            self.values_from + other.values_from,
            self.bytes_from + other.bytes_from,
            self.evicted + other.evicted,
            self.held_bytes | other.held_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """In plain types, which cross processes; ``from_dict`` reads it back."""
        return {
            "tokens": dict(self.tokens),
            "failures": dict(self.failures),
            "load_s": list(self.load_s),
            "repair_s": list(self.repair_s),
            "refused": dict(self.refused),
            "values_from": dict(self.values_from),
            "bytes_from": dict(self.bytes_from),
            "evicted": dict(self.evicted),
            "held_bytes": dict(self.held_bytes),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> LoadCounts:
        """Of nothing where nothing is there."""
        return cls(
            Counter(value.get("tokens", {})),
            Counter(value.get("failures", {})),
            list(value.get("load_s", ())),
            list(value.get("repair_s", ())),
            Counter(value.get("refused", {})),
            Counter(value.get("values_from", {})),
            Counter(value.get("bytes_from", {})),
            Counter(value.get("evicted", {})),
            dict(value.get("held_bytes", {})),
        )

    def summary(self) -> dict[str, int | float]:
        """What is worth a line of log."""
        return {
            "loads": len(self.load_s),
            **{f"{kind} tokens": count for kind, count in sorted(self.tokens.items()) if count},
            **{f"failed, {reason}": count for reason, count in sorted(self.failures.items())},
            **{f"plans {why}": count for why, count in sorted(self.refused.items())},
            **{f"values from {where}": count for where, count in sorted(self.values_from.items())},
            "load seconds": round(sum(self.load_s), 3),
            "repair seconds": round(sum(self.repair_s), 3),
        }
