"""What was measured of each request, and a contestant's figures from it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ragcache_wire.v1 import engine_pb2

_PREDICTED = "predicted_"


@dataclass(frozen=True, slots=True)
class Measured:
    """One answered request.

    Attributes:
        ttft_s: Time to first token, at the client.
        prompt_tokens: Length of the prompt.
        cached_tokens: Prompt tokens that vLLM reports as cached, loaded ones included.
        answer_s: Time to the end of the answer.
        record: Numeric fields of the engine's record by name. Empty without our connector.
        miss: The record's reason why no more was loaded.
    """

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    answer_s: float = 0.0
    record: Mapping[str, float] = field(default_factory=dict)
    miss: str = ""

    def delayed(self, waited_s: float) -> Measured:
        """Return the same with time that it waited before it was sent."""
        return replace(self, ttft_s=self.ttft_s + waited_s, answer_s=self.answer_s + waited_s)

    def with_record(self, record: engine_pb2.RequestRecord) -> Measured:
        """Return the same with the engine's record."""
        values = {
            known.name: getattr(record, known.name)
            for known in record.DESCRIPTOR.fields
            if isinstance(getattr(record, known.name), int | float)
        }
        return replace(self, record=values, miss=record.miss)

    @property
    def blended(self) -> bool:
        """Whether the engine blended the prompt."""
        return self.record.get("blended_tokens", 0) > 0

    def tokens_by_origin(self) -> dict[str, float]:
        """Return prompt tokens by where their KV came from."""
        if not self.record:
            cached = self.cached_tokens
            return {"vllm_cache": cached, "computed": self.prompt_tokens - cached}
        local, loaded, blended, recomputed = (
            self.record.get(f"{kind}_tokens", 0)
            for kind in ("local", "loaded", "blended", "recomputed")
        )
        return {
            "vllm_cache": local,
            "loaded_exact": loaded - blended,
            "loaded_blended": max(0, blended - recomputed),
            "recomputed": recomputed,
            "computed": self.prompt_tokens - local - loaded,
        }

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens that an ordinary prefill computed."""
        return self.tokens_by_origin()["computed"]

    @property
    def processed_tokens(self) -> float:
        """Computed and recomputed tokens."""
        origin = self.tokens_by_origin()
        return origin["computed"] + origin.get("recomputed", 0)

    def seconds_by_stage(self) -> dict[str, float]:
        """Return the time to first token by stage. ``server`` is what the engine has no record of.

        Without a record all of it is ``server``. ``load`` excludes ``recompute``.
        """
        record = self.record
        stages = {
            "queue": record.get("queue_s", 0.0),
            "lookup": record.get("lookup_s", 0.0),
            "load": record.get("load_s", 0.0) - record.get("recompute_s", 0.0),
            "recompute": record.get("recompute_s", 0.0),
            "prefill": record.get("prefill_s", 0.0),
        }
        return stages | {"server": self.ttft_s - sum(stages.values())}

    def prediction_errors_s(self) -> dict[str, float]:
        """Return measured less predicted seconds by stage, where the record has both."""
        return {
            stage: self.record[stage] - predicted_s
            for name, predicted_s in self.record.items()
            if name.startswith(_PREDICTED)
            and (stage := name.removeprefix(_PREDICTED)) in self.record
        }


def contestant_figures(measured: Sequence[Measured], cpu_s: float) -> dict[str, Any]:
    """Return a contestant's figures for the JSON line.

    Args:
        measured: In the order of the requests, at least one.
        cpu_s: CPU time of its processes for them, background work included.
    """
    times = np.array([one.ttft_s for one in measured])
    found: dict[str, Any] = {
        "requests": len(measured),
        "ttft_mean_s": round(float(times.mean()), 4),
        "ttft_p50_s": round(float(np.quantile(times, 0.5)), 4),
        "ttft_p95_s": round(float(np.quantile(times, 0.95)), 4),
        "tokens_by_origin": _sums((one.tokens_by_origin() for one in measured), 0),
        "cpu_s_per_request": round(cpu_s / len(measured), 3),
    }
    if not measured[0].record:
        return found
    return found | {
        "mean_ms_by_stage": _mean_ms(one.seconds_by_stage() for one in measured),
        "loaded_bytes": int(sum(one.record.get("loaded_bytes", 0) for one in measured)),
        "blended_requests": sum(one.blended for one in measured),
        "misses": _counts(one.miss for one in measured),
        "blended": _blended_figures([one for one in measured if one.blended]),
        "prediction_error_ms": prediction_error_ms(measured),
    }


def _blended_figures(blended: Sequence[Measured]) -> dict[str, Any]:
    if not blended:
        return {}
    stages = _mean_ms(one.seconds_by_stage() for one in blended)
    mean_s = statistics.fmean(one.ttft_s for one in blended)
    return {
        "ttft_mean_s": round(mean_s, 4),
        "mean_ms_by_stage": stages,
        "share_by_stage": {name: round(ms / 1e3 / mean_s, 3) for name, ms in stages.items()},
        "tokens_by_origin": _sums((one.tokens_by_origin() for one in blended), 0),
        "recomputed_share": round(
            sum(one.record["recomputed_tokens"] for one in blended)
            / sum(one.record["blended_tokens"] for one in blended),
            4,
        ),
    }


def prediction_error_ms(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Return bias and mean absolute error of the engine's predictions, by stage."""
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for one in measured:
        for stage, error_s in one.prediction_errors_s().items():
            errors[stage].append(error_s * 1e3)
    return {
        stage: {
            "bias": round(statistics.fmean(found), 1),
            "mean_absolute": round(statistics.fmean(map(abs, found)), 1),
        }
        for stage, found in errors.items()
    }


def _sums(rows: Iterable[Mapping[str, float]], digits: int) -> dict[str, float]:
    totals: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        for name, value in row.items():
            totals[name] += value
    return {name: round(value, digits or None) for name, value in totals.items()}


def _mean_ms(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    kept = list(rows)
    return {name: round(total * 1e3 / len(kept), 1) for name, total in _sums(kept, 9).items()}


def _counts(reasons: Iterable[str]) -> dict[str, int]:
    found: defaultdict[str, int] = defaultdict(int)
    for reason in reasons:
        found[reason or "none"] += 1
    return dict(found)
