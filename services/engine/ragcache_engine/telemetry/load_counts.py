"""Counts loads, computed tokens, refused plans, and values in the engine's own tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

from ragcache_engine.protocol.messages import LoadOutcome

EXACT, BLENDED, RECOMPUTED, COMPUTED = "exact", "blended", "recomputed", "computed"
"""Kinds of prompt tokens, by where their KV came from.

EXACT: loaded, and exact. BLENDED: loaded, not exact, and not recomputed. RECOMPUTED: recomputed by
the connector, in passes of its own or beside vLLM's own tokens. COMPUTED: computed by vLLM's own
prefill.
"""

DECODING = "decoding"
"""Key of ``LoadCounts.queue`` with the number of decoding requests."""


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Changes of the engine's own tiers since the last report, by the name of the tier."""

    # Values that left the tier.
    evicted: Mapping[str, int]
    # Bytes in the tier now. Tiers that have not changed are left out.
    held_bytes: Mapping[str, int]


@dataclass(slots=True)
class LoadCounts:
    """Counts since the last report. They cross processes as plain types (``to_dict``)."""

    # Prompt tokens by kind.
    tokens: Counter[str] = field(default_factory=Counter)
    # Failed loads, and values that a load recomputed because they did not arrive, by reason.
    failures: Counter[str] = field(default_factory=Counter)
    # Seconds of each load, and of each recomputation.
    load_s: list[float] = field(default_factory=list)
    recompute_s: list[float] = field(default_factory=list)
    # Measured over predicted seconds, by stage (``RequestRecord.prediction_ratios``).
    prediction_ratios: dict[str, list[float]] = field(default_factory=dict)
    # By reason.
    refused_plans: Counter[str] = field(default_factory=Counter)
    # Loaded values and their bytes, by tier: one of the engine's own, or the store.
    values_by_tier: Counter[str] = field(default_factory=Counter)
    bytes_by_tier: Counter[str] = field(default_factory=Counter)
    # As in TierCounts.
    evicted: Counter[str] = field(default_factory=Counter)
    held_bytes: dict[str, int] = field(default_factory=dict)
    # What the engine has to do, if that has changed: pending seconds by kind, and DECODING.
    queue: dict[str, float] = field(default_factory=dict)
    # Uses that are reported to the store, by source, and those that were dropped (``UseReporter``).
    uses: Counter[str] = field(default_factory=Counter)
    # Seconds that loads saved, and that they took in excess, against the predicted computing.
    saved_s: float = 0.0
    excess_s: float = 0.0

    def __bool__(self) -> bool:
        return any(self.to_dict().values())

    def add(self, outcome: LoadOutcome) -> None:
        """Count one load."""
        self.tokens[EXACT] += outcome.tokens - outcome.blended_tokens
        self.tokens[BLENDED] += max(0, outcome.blended_tokens - outcome.recomputed_tokens)
        self.tokens[RECOMPUTED] += outcome.recomputed_tokens
        if outcome.reason:
            self.failures[outcome.reason] += 1
        self.failures.update(outcome.missing_reasons)
        self.load_s.append(outcome.seconds)
        self.values_by_tier.update(outcome.values_by_tier)
        self.bytes_by_tier.update(outcome.bytes_by_tier)
        if outcome.recompute_s:
            self.recompute_s.append(outcome.recompute_s)

    def add_saved(self, predicted_s: float, took_s: float) -> None:
        """Count a request with loaded KV.

        Args:
            predicted_s: Time that computing the loaded and the computed tokens was predicted to
                take.
            took_s: Time that loading and computing took.
        """
        self.saved_s += max(0.0, predicted_s - took_s)
        self.excess_s += max(0.0, took_s - predicted_s)

    def add_pass(self, prompt_tokens: int) -> None:
        """Count the prompt tokens that one pass computed."""
        if prompt_tokens:
            self.tokens[COMPUTED] += prompt_tokens

    def add_tiers(self, counts: TierCounts) -> None:
        """Count the changes of the engine's own tiers."""
        self.evicted.update(counts.evicted)
        self.held_bytes.update(counts.held_bytes)

    def __add__(self, other: LoadCounts) -> LoadCounts:
        ratios, others = self.prediction_ratios, other.prediction_ratios
        sums: dict[str, Any] = {
            "prediction_ratios": {
                stage: [*ratios.get(stage, ()), *others.get(stage, ())]
                for stage in {**ratios, **others}
            },
            "held_bytes": self.held_bytes | other.held_bytes,
            "queue": self.queue | other.queue,
        }
        added = [one.name for one in fields(self) if one.name not in sums]
        return LoadCounts(
            **sums, **{name: getattr(self, name) + getattr(other, name) for name in added}
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the counts in plain types."""
        counts = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: dict(count) if isinstance(count, dict) else copy(count)
            for name, count in counts.items()
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> LoadCounts:
        """Return the counts that ``to_dict`` wrote. An empty mapping means none."""
        counts = cls()
        for name, count in value.items():
            setattr(counts, name, type(getattr(counts, name))(count))
        return counts

    def summary(self) -> dict[str, int | float]:
        """Return what vLLM's log line shows."""
        tokens = {f"{kind} tokens": count for kind, count in sorted(self.tokens.items()) if count}
        return {
            "loads": len(self.load_s),
            **tokens,
            **{f"failed, {reason}": count for reason, count in sorted(self.failures.items())},
            **{f"plans {reason}": count for reason, count in sorted(self.refused_plans.items())},
            **{f"values from {tier}": count for tier, count in sorted(self.values_by_tier.items())},
            "load seconds": round(sum(self.load_s), 3),
            "recompute seconds": round(sum(self.recompute_s), 3),
            "saved seconds": round(self.saved_s, 3),
        }
