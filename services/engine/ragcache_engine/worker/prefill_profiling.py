"""Measure what computing takes, before the first request (RAGCache §5.1).

The passes are those of repairs, through vLLM's own model, over blocks that nothing lies in yet.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_core.errors import InvalidInput

if TYPE_CHECKING:
    from ragcache_engine.blend.recomputer import Recomputer
    from ragcache_engine.kv_cache.device_event import DeviceEvent
    from ragcache_engine.kv_cache.paged_cache import PagedCache

log = logging.getLogger("vllm.ragcache")

_LEAST = 1
"""Tokens of the shortest pass that is measured."""

_STEP = 4
"""A pass has so many times the tokens of the one before it."""

_TIMES = 2
"""Passes at each point, of which the quicker one counts: whatever comes between makes them slower,
never quicker."""

_NULL_BLOCK = 0
"""vLLM's, which stands for none."""


def measure(
    cache: PagedCache, recomputer: Recomputer, *, num_blocks: int, max_length: int, budget_s: float
) -> PrefillProfile:
    """Take the profile of the model on this machine.

    num_blocks: of the paged cache, none of which is in use. max_length: of a prompt. budget_s: how
    long it may take, roughly: of a grid that takes longer the longest passes are left out, and
    predicted by the others.
    """
    size = cache.shape.block_size
    room = min(max_length, (num_blocks - 1 - _NULL_BLOCK) * size)
    longest = min(recomputer.max_tokens, room)
    clock = _Clock(cache, recomputer, range(1 + _NULL_BLOCK, num_blocks), room)
    clock.pass_s(0, _LEAST)  # what a first pass does once is no part of any
    column: dict[int, float] = {}
    for computed in _sizes(longest):
        column[computed] = seconds = clock.pass_s(0, computed)
        # The next takes several times as long, and each size is passed over behind all of cached.
        if clock.spent_s + 3 * _TIMES * _STEP * seconds > budget_s:
            break
    # Behind anything at hand there is room for no more than what is left.
    far = room - max(column)
    cached = [0, *sorted({c for c in (far // 2, far) if c >= size})]
    rows = [tuple(column.values())]
    for at_hand in cached[1:]:
        rows.append(tuple(clock.pass_s(at_hand, computed) for computed in column))
    return PrefillProfile(tuple(cached), tuple(column), tuple(rows), recomputer.max_tokens)


def read_saved_profile(path: Path) -> PrefillProfile | None:
    """The profile that an earlier start has left at path; None where there is none to be read."""
    try:
        return PrefillProfile.from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InvalidInput) as error:
        log.warning("the profile at %s is measured anew: %s", path, error)
        return None


def write_profile(path: Path, profile: PrefillProfile) -> None:
    """Leave it for the next start, where the folder can be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(profile.to_json()))
        unfinished.replace(path)
    except OSError as error:
        log.warning("the profile is measured again at the next start: %s", error)


def profile_path(folder: Path, **what: Any) -> Path:
    """Where the profile of just this model, machine and setting lies."""
    name = hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=16).hexdigest()
    return folder / "ragcache" / f"prefill-{name}.json"


def _sizes(longest: int) -> Iterator[int]:
    size = _LEAST
    while size < longest:
        yield size
        size *= _STEP
    yield longest


class _Clock:
    def __init__(
        self, cache: PagedCache, recomputer: Recomputer, blocks: Sequence[int], room: int
    ) -> None:
        self._cache, self._recomputer, self._blocks = cache, recomputer, blocks
        # Which tokens is no matter, as long as the model has them.
        self._token_ids = [0] * room
        self.spent_s = 0.0

    def pass_s(self, cached: int, computed: int) -> float:
        """Seconds of a pass over so many tokens behind so many at hand."""
        run = range(cached, cached + computed)
        table = self._blocks[: -(-run.stop // self._cache.shape.block_size)]
        quickest = float("inf")
        for _ in range(_TIMES):
            began: DeviceEvent = self._cache.record_event()
            self._recomputer.recompute(self._token_ids, table, [run])
            seconds = self._cache.record_event().seconds_since(began)
            self.spent_s += seconds
            quickest = min(quickest, seconds)
        return quickest
