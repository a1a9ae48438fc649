"""Measures how long forward passes take on this machine, before the first request.

The passes are recomputations through vLLM's own model, over blocks that are still empty.

Source: RAGCache section 5.1.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import InvalidInput
from ragcache_engine.kv_cache.device_event import DeviceEvent
from ragcache_engine.kv_cache.paged_cache import PagedCache

if TYPE_CHECKING:
    from ragcache_engine.blend.recomputer import Recomputer  # imports vLLM

log = logging.getLogger("vllm.ragcache")

_MIN_TOKENS = 1
"""Tokens of the shortest measured pass."""

_GROWTH = 4
"""Each measured pass has four times the tokens of the one before."""

_REPETITIONS = 2
"""Passes per point. The faster one counts, because interference only makes a pass slower."""

_NULL_BLOCK = 0
"""vLLM's placeholder block, which holds no KV."""


def measure_profile(
    cache: PagedCache, recomputer: Recomputer, *, num_blocks: int, max_length: int, budget_s: float
) -> PrefillProfile:
    """Measure the profile of the model on this machine.

    Args:
        cache: vLLM's paged cache, which no request uses yet.
        recomputer: Runs the passes.
        num_blocks: Blocks of the cache.
        max_length: Longest prompt, in tokens.
        budget_s: How long to measure, roughly. If the grid takes longer, its longest passes are
            left out and extrapolated from the others.
    """
    block_size = cache.shape.block_size
    max_tokens = min(max_length, (num_blocks - 1 - _NULL_BLOCK) * block_size)
    longest_pass = min(recomputer.max_tokens, max_tokens)
    timer = _PassMeasurement(cache, recomputer, range(1 + _NULL_BLOCK, num_blocks), max_tokens)
    timer.pass_s(0, _MIN_TOKENS)  # warm-up
    first_row: dict[int, float] = {}
    for computed in _pass_sizes(longest_pass):
        first_row[computed] = seconds = timer.pass_s(0, computed)
        # The next size takes several times as long, and the grid has up to three rows.
        if timer.spent_s + 3 * _REPETITIONS * _GROWTH * seconds > budget_s:
            break
    most_cached = max_tokens - max(first_row)
    cached = [0, *sorted({c for c in (most_cached // 2, most_cached) if c >= block_size})]
    rows = [tuple(first_row.values())]
    for num_cached in cached[1:]:
        rows.append(tuple(timer.pass_s(num_cached, computed) for computed in first_row))
    return PrefillProfile(tuple(cached), tuple(first_row), tuple(rows), recomputer.max_tokens)


def read_saved_profile(path: Path) -> PrefillProfile | None:
    """Return the profile that an earlier start has written, or None."""
    try:
        return PrefillProfile.from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InvalidInput) as error:
        log.warning("profile: cannot read, measuring again path=%s error=%s", path, error)
        return None


def write_profile(path: Path, profile: PrefillProfile) -> None:
    """Write a profile for the next start. A folder that is read-only is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(profile.to_json()))
        temporary.replace(path)
    except OSError as error:
        log.warning("profile: cannot write, the next start measures again error=%s", error)


def profile_path(folder: Path, **conditions: Any) -> Path:
    """Return the path of the profile for a model, machine and configuration."""
    identity = json.dumps(conditions, sort_keys=True).encode()
    name = hashlib.blake2b(identity, digest_size=16).hexdigest()
    return folder / "ragcache" / f"prefill-{name}.json"


def processor_name(device: torch.device) -> str:
    """Return the name of the processor that a model runs on, and how many threads it uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _pass_sizes(longest: int) -> Iterator[int]:
    size = _MIN_TOKENS
    while size < longest:
        yield size
        size *= _GROWTH
    yield longest


class _PassMeasurement:
    def __init__(
        self, cache: PagedCache, recomputer: Recomputer, blocks: Sequence[int], max_tokens: int
    ) -> None:
        self._cache, self._recomputer, self._blocks = cache, recomputer, blocks
        # The time does not depend on the tokens.
        self._token_ids = [0] * max_tokens
        self.spent_s = 0.0

    def pass_s(self, cached: int, computed: int) -> float:
        """Return the seconds of a pass that computes tokens after cached ones."""
        run = range(cached, cached + computed)
        table = self._blocks[: -(-run.stop // self._cache.shape.block_size)]
        fastest_s = float("inf")
        for _ in range(_REPETITIONS):
            began: DeviceEvent = self._cache.record_event()
            self._recomputer.recompute(self._token_ids, table, [run])
            # All ranks must measure the same passes.
            seconds = self._recomputer.ranks.slowest(
                self._cache.record_event().seconds_since(began)
            )
            self.spent_s += seconds
            fastest_s = min(fastest_s, seconds)
        return fastest_s
