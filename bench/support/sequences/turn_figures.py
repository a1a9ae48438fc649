"""What was measured of each request, and a contestant's figures from it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from google.protobuf.message import Message

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
        record: Numeric fields of the engine's record by name; those of the prediction begin with
            ``predicted_``. Empty without our connector.
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
        values = _numbers(record)
        if record.HasField("predicted"):
            predicted = _numbers(record.predicted)
            values |= {f"{_PREDICTED}{name}": seconds for name, seconds in predicted.items()}
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

        ``queue`` includes the lookup. Without a record all of it is ``server``.
        """
        queue_s, load_s, recompute_s, select_s, prefill_s = (
            self.record.get(f"{stage}_s", 0.0)
            for stage in ("queue", "load", "recompute", "select", "prefill")
        )
        stages = {
            "queue": queue_s,
            "load": load_s - recompute_s,
            "select": select_s,
            "recompute": recompute_s - select_s,
            "prefill": prefill_s,
        }
        return stages | {"server": self.ttft_s - sum(stages.values())}

    def predictions_s(self) -> dict[str, tuple[float, float]]:
        """Return predicted and measured seconds by stage, where the record has a prediction."""
        stages = self.seconds_by_stage()
        measured = {
            "load": stages["load"],
            "select": stages["select"],
            "passes": stages["recompute"] + stages["prefill"],
        }
        return {
            stage: (self.record[name], seconds)
            for stage, seconds in measured.items()
            if (name := f"{_PREDICTED}{stage}_s") in self.record
        }


def _numbers(message: Message) -> dict[str, float]:
    return {
        known.name: value
        for known in message.DESCRIPTOR.fields
        if isinstance(value := getattr(message, known.name), int | float)
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
        "computed": _computed_figures([one for one in measured if not one.blended]),
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
        "prediction_error_ms": prediction_error_ms(blended),
        "recomputed_share": round(
            sum(one.record["recomputed_tokens"] for one in blended)
            / sum(one.record["blended_tokens"] for one in blended),
            4,
        ),
    }


def _computed_figures(computed: Sequence[Measured]) -> dict[str, Any]:
    tokens = sum(one.computed_tokens for one in computed)
    if not tokens:
        return {}
    return {
        "requests": len(computed),
        "ttft_mean_s": round(statistics.fmean(one.ttft_s for one in computed), 4),
        "ttft_ms_per_token": round(sum(one.ttft_s for one in computed) * 1e3 / tokens, 3),
    }


def prediction_error_ms(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Return the errors of the engine's predictions by stage: measured less predicted."""
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in measured:
        for stage, times in one.predictions_s().items():
            found[stage].append(times)
    errors = {}
    for stage, pairs in found.items():
        predicted, took = np.array(pairs).T * 1e3
        errors[stage] = {
            "predicted_mean": round(float(predicted.mean()), 1),
            "bias": round(float((took - predicted).mean()), 1),
            "mean_absolute": round(float(np.abs(took - predicted).mean()), 1),
        }
    return errors


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
