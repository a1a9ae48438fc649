"""Chunks of several families of models can be blended: GQA, tied or not, all kinds of rotation."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.families_inside import FAMILIES

pytestmark = pytest.mark.timeout(600)

ROUNDING = 0.01
"""bfloat16 has about three decimal digits."""

REFUSED = "mistral, sliding window"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What ``tests.families_inside`` says of each."""
    folder = tmp_path_factory.mktemp("families")
    argv = [sys.executable, "-m", "tests.families_inside", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != REFUSED])
def test_a_familys_keys_are_moved_and_its_prompts_recomputed(
    found: dict[str, dict[str, Any]], family: str
) -> None:
    said = found[family]
    assert "refused" not in said
    assert said["whole_equals_prefill"]
    assert said["values_equal"]
    assert said["moved_error"] < ROUNDING
    assert said["unmoved_error"] > 10 * ROUNDING


def test_a_sliding_window_is_refused_with_a_reason(found: dict[str, dict[str, Any]]) -> None:
    assert "sliding_window = 64" in found[REFUSED]["refused"]
