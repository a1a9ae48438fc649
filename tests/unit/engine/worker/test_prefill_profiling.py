"""The grid of passes that is measured at start, and its file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.cost.prefill_profile import PrefillProfile
from ragcache_engine.blend.ranks import ONE_RANK
from ragcache_engine.worker.prefill_profiling import (
    measure_profile,
    profile_path,
    read_saved_profile,
    write_profile,
)

BLOCK = 32


class SimulatedMachine:
    """Runs passes of a given duration, on a clock of its own."""

    def __init__(self, max_tokens: int, token_s: float) -> None:
        self.max_tokens, self._token_s, self.ranks = max_tokens, token_s, ONE_RANK
        self.now_s = 0.0
        self.passes: list[range] = []
        self.blocks: set[int] = set()
        self.shape = SimpleNamespace(block_size=BLOCK)

    def record_event(self) -> Any:
        at = self.now_s
        return SimpleNamespace(at=at, seconds_since=lambda earlier: at - earlier.at)

    def recompute(
        self, token_ids: Sequence[int], blocks: Sequence[int], runs: Sequence[range]
    ) -> None:
        [run] = runs
        assert run.stop <= len(token_ids)
        assert run.stop <= len(blocks) * BLOCK
        assert len(run) <= self.max_tokens
        self.blocks.update(blocks)
        self.passes.append(run)
        self.now_s += 1e-4 + self._token_s * len(run) * (1 + 1e-3 * run.start)


def measure(machine: SimulatedMachine, **given: Any) -> PrefillProfile:
    cache: Any = machine
    recomputer: Any = machine
    asked = {"num_blocks": 100, "max_length": 2048, "budget_s": 5.0} | given
    return measure_profile(cache, recomputer, **asked)


def test_a_fast_model_is_measured_up_to_the_longest_pass_and_prompt() -> None:
    machine = SimulatedMachine(1024, 1e-6)
    profile = measure(machine)
    assert profile.computed == (1, 4, 16, 64, 256, 1024)
    assert profile.cached == (0, 512, 1024)
    assert max(run.stop for run in machine.passes) == 2048
    assert profile.predict(700, 300) == pytest.approx(1e-4 + 1e-6 * 300 * 1.7, rel=0.01)


def test_a_slow_model_is_measured_by_short_passes() -> None:
    machine = SimulatedMachine(1024, 2e-3)
    profile = measure(machine, budget_s=5.0)
    assert profile.computed[-1] < 1024
    assert machine.now_s < 2 * 5.0
    assert profile.predict(0, 1024) == pytest.approx(2e-3 * 1024, rel=0.05)


@given(st.integers(3, 200), st.integers(1, 8192), st.integers(1, 4096))
def test_every_cache_size_and_length_gives_a_profile(
    num_blocks: int, max_length: int, max_tokens: int
) -> None:
    machine = SimulatedMachine(max_tokens, 1e-6)
    profile = measure(machine, num_blocks=num_blocks, max_length=max_length)
    assert max(run.stop for run in machine.passes) <= max_length
    assert machine.blocks <= set(range(1, num_blocks))
    assert profile.pass_tokens == max_tokens


def test_a_profile_is_saved_for_the_next_start(tmp_path: Path) -> None:
    path = profile_path(tmp_path, model="a", threads=2)
    assert read_saved_profile(path) is None
    profile = measure(SimulatedMachine(1024, 1e-6))
    write_profile(path, profile)
    assert read_saved_profile(path) == profile
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_each_model_and_machine_has_its_own_path() -> None:
    paths = {
        profile_path(Path("/x"), model=model, threads=threads)
        for model in "ab"
        for threads in (1, 2)
    }
    assert len(paths) == 4


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"cached": [0]})])
def test_an_unreadable_profile_is_none(content: str, tmp_path: Path) -> None:
    path = profile_path(tmp_path)
    path.parent.mkdir()
    path.write_text(content)
    assert read_saved_profile(path) is None


def test_a_read_only_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "ragcache").write_text("a file, where the folder should be")
    write_profile(profile_path(tmp_path), measure(SimulatedMachine(1024, 1e-6)))
