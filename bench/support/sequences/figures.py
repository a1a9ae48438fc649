"""What the replay of a sequence gives: figures by contestant, ratios with intervals, and the cap.

The cap is the gain that token counts alone allow, with caches that never evict. Plain vLLM computes
what follows the longest prefix that an earlier request had. Chunk reuse also computes the recompute
share of each passage that an earlier request had anywhere. Loading and all else cost nothing. The
cap is the quotient of both counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.support.comparison import interval, mean_ratio, quantile_ratio, slower_share
from bench.support.program import rounded
from bench.support.sequences.requests import Part, SequenceRequest
from ragcache_wire.v1 import engine_pb2


@dataclass(frozen=True, slots=True)
class Measured:
    """One answered request.

    Attributes:
        ttft_s: Time to first token, at the client.
        cached_tokens: Prompt tokens that vLLM reports as cached, loaded ones included.
        record: The engine's record. None without our connector.
        cpu_s: CPU time of the contestant's turn, background work included, divided by its requests.
    """

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    record: engine_pb2.RequestRecord | None = None
    cpu_s: float = 0.0

    def tokens_by_origin(self) -> dict[str, int]:
        """Return prompt tokens by where their KV came from."""
        if (record := self.record) is None:
            cached = self.cached_tokens
            return {"vllm_cache": cached, "computed": self.prompt_tokens - cached}
        return {
            "vllm_cache": record.local_tokens,
            "loaded_exact": record.loaded_tokens - record.blended_tokens,
            "loaded_blended": max(0, record.blended_tokens - record.recomputed_tokens),
            "recomputed": record.recomputed_tokens,
            "computed": self.prompt_tokens - record.local_tokens - record.loaded_tokens,
        }

    def seconds_by_stage(self) -> dict[str, float]:
        """Return the time to first token by stage. ``server`` is what the engine has no record of.

        ``queue`` includes the lookup. Without a record all of it is ``server``.
        """
        record = self.record or engine_pb2.RequestRecord()
        stages = {
            "queue": record.queue_s,
            "load": record.load_s - record.recompute_s,
            "select": record.select_s,
            "recompute": record.recompute_s - record.select_s,
            "prefill": record.prefill_s,
        }
        return stages | {"server": self.ttft_s - sum(stages.values())}


def contestant_figures(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return a contestant's figures for the JSON line.

    Args:
        measured: In the order of the requests, at least one.
    """
    times = np.array([one.ttft_s for one in measured])
    found: dict[str, Any] = {
        "requests": len(measured),
        "ttft_mean_s": round(float(times.mean()), 4),
        "ttft_p50_s": round(float(np.quantile(times, 0.5)), 4),
        "ttft_p95_s": round(float(np.quantile(times, 0.95)), 4),
        "tokens_by_origin": _sums(one.tokens_by_origin() for one in measured),
        "cpu_s_per_request": round(sum(one.cpu_s for one in measured) / len(measured), 3),
    }
    records = [one.record for one in measured if one.record is not None]
    if not records:
        return found
    blended = [one for one in measured if one.record and one.record.blended_tokens]
    return found | {
        "mean_ms_by_stage": _mean_ms(measured),
        "loaded_bytes": sum(one.loaded_bytes for one in records),
        "blended_requests": len(blended),
        "misses": Counter(one.miss or "none" for one in records),
        "blended": {"mean_ms_by_stage": _mean_ms(blended)} if blended else {},
    }


def _sums(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            totals[name] += value  # type: ignore[assignment]  # also of seconds
    return dict(totals)


def _mean_ms(measured: Sequence[Measured]) -> dict[str, float]:
    totals_s = _sums(one.seconds_by_stage() for one in measured)
    return rounded({name: 1e3 * s / len(measured) for name, s in totals_s.items()}, 1)


def compare(
    measured: Mapping[str, Sequence[Measured]],
    plain: str,
    plain_again: str,
    caps: Mapping[str, float],
) -> dict[str, Any]:
    """Return ratios to plain vLLM with their 95 % intervals.

    Args:
        measured: The measured requests of each contestant, the same ones in the same order.
        plain: Name of the plain contestant.
        plain_again: Name of the second plain contestant. If it was measured, every ratio has both.
        caps: The cap of contestants that have one.
    """
    times = {name: np.array([one.ttft_s for one in found]) for name, found in measured.items()}
    first, again = times[plain], times.get(plain_again)
    reference = first if again is None else np.stack([first, again])
    count = len(first)
    everything = np.arange(count)
    figures: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for name, found in times.items():
        if name in (plain, plain_again):
            continue
        mean = f"plain_over_{name}_mean"
        statistics = {
            mean: mean_ratio(reference, found),
            f"plain_over_{name}_p50": quantile_ratio(reference, found, 0.5),
            f"plain_over_{name}_p95": quantile_ratio(reference, found, 0.95),
            f"{name}_slower_share": slower_share(found, first, again),
        }
        for figure, statistic in statistics.items():
            figures[figure] = statistic(everything)
            intervals[figure] = interval(statistic, count)
        if (cap := caps.get(name)) is not None:
            figures[f"{name}_gain_over_cap"] = figures[mean] / cap
            low, high = intervals[mean]
            intervals[f"{name}_gain_over_cap"] = (low / cap, high / cap)
    if again is not None:
        against_itself = mean_ratio(first, again)
        figures["plain_over_plain_again_mean"] = against_itself(everything)
        intervals["plain_over_plain_again_mean"] = interval(against_itself, count)
        both = slower_share(first, again, None), slower_share(again, first, None)
        figures["plain_slower_share"] = sum(share(everything) for share in both) / 2
    return rounded(figures) | {
        "intervals": {
            name: (round(low, 4), round(high, 4)) for name, (low, high) in intervals.items()
        }
    }


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """Tokens of the measured requests that each kind of reuse computes."""

    prompt: int
    plain: float
    exact: float
    blend: float

    def caps(self, suffix: str = "") -> dict[str, float]:
        return {
            f"exact{suffix}": self.plain / self.exact,
            f"blend{suffix}": self.plain / self.blend,
        }


class PrefixTree:
    """Prompts as chains of part names."""

    def __init__(self) -> None:
        self._children: dict[str, PrefixTree] = {}

    def insert(self, names: Iterable[str]) -> int:
        """Add a chain, and return how many of its first parts an earlier chain had."""
        node, known = self, 0
        for name in names:
            child = node._children.get(name)
            if child is None:
                child = node._children[name] = PrefixTree()
            else:
                known += 1  # a new child has no children, so known parts are the first ones
            node = child
        return known


def computed_tokens(
    requests: Sequence[SequenceRequest],
    measured_from: int,
    recompute_share: float,
    ahead: Sequence[SequenceRequest] = (),
) -> ComputedTokens:
    """Count the tokens that each kind of reuse computes of a sequence.

    Every prompt's last token is computed, because it generates the first token of the answer.

    Args:
        measured_from: Index of the first request that counts. Those before it fill the caches.
        recompute_share: Share of a known passage that ``blend`` computes.
        ahead: Prompts that were computed before the sequence, without plain vLLM.
    """
    plain_tree, exact_tree = PrefixTree(), PrefixTree()
    seen: set[str] = set()
    for prompt in ahead:
        exact_tree.insert(part.name for part in prompt.parts)
        seen.update(part.name for part in prompt.passages)
    total = 0
    plain = exact = blend = 0.0
    for index, request in enumerate(requests):
        names = [part.name for part in request.parts]
        plain_known, exact_known = plain_tree.insert(names), exact_tree.insert(names)
        if index >= measured_from:
            total += request.num_tokens
            plain += max(1.0, _tokens_from(request, plain_known))
            exact += max(1.0, _tokens_from(request, exact_known))
            saved = sum(
                len(part.token_ids) * (1 - recompute_share)
                for part in request.parts[exact_known:]
                if part.part is Part.PASSAGE and part.name in seen
            )
            blend += max(1.0, _tokens_from(request, exact_known) - saved)
        seen.update(part.name for part in request.passages)
    return ComputedTokens(total, plain, exact, blend)


def useful_warm_up(requests: Sequence[SequenceRequest], measured_from: int) -> list[int]:
    """Return the warm-up requests that give the measured ones their longest known prefixes.

    A cache that serves prefixes only, and evicts none of them, is then as warm as after all
    warm-up requests. The last request with a prefix counts.
    """
    last: dict[tuple[str, ...], int] = {}
    for index, request in enumerate(requests[:measured_from]):
        last |= dict.fromkeys(_prefixes(request), index)
    useful: set[int] = set()
    for request in requests[measured_from:]:
        useful.update([last[chain] for chain in _prefixes(request) if chain in last][-1:])
    return sorted(useful)


def _prefixes(request: SequenceRequest) -> list[tuple[str, ...]]:
    names = [part.name for part in request.parts]
    return [tuple(names[:end]) for end in range(1, len(names) + 1)]


def _tokens_from(request: SequenceRequest, first: int) -> int:
    return sum(len(part.token_ids) for part in request.parts[first:])
