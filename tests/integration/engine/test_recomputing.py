"""Passes of our own through the model inside a real vLLM engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(300)

ROUNDING = 0.01
"""Sums of another order round otherwise; bfloat16 has about three decimal digits."""

ROUNDING_FLOAT32 = 1e-5
"""It has about seven, so that even one token less to look at, of hundreds, would show."""


def said_inside(model: Path, dtype: str) -> dict[str, Any]:
    """What ``tests.helpers.engine_inside`` says; vLLM is not one to share a process with other tests."""
    argv = [sys.executable, "-m", "tests.helpers.engine_inside", str(model), dtype]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.fixture(scope="module")
def found(tiny_model: Path) -> dict[str, Any]:
    """In the model's own numbers."""
    return said_inside(tiny_model, "bfloat16")


@pytest.fixture(scope="module")
def found_in_float32(tiny_model: Path) -> dict[str, Any]:
    return said_inside(tiny_model, "float32")


def test_computing_everything_anew_gives_the_very_bits_of_a_prefill(found: dict[str, Any]) -> None:
    assert found["whole_equals_prefill"]


def test_pieces_one_after_another_are_the_very_bits_of_a_prefill_in_such_pieces(
    found: dict[str, Any], found_in_float32: dict[str, Any]
) -> None:
    assert found["pieces_equal_prefill"]
    assert found_in_float32["pieces_equal_prefill"]


def test_slices_one_after_another_come_to_the_whole(
    found: dict[str, Any], found_in_float32: dict[str, Any]
) -> None:
    assert found["slices_error"] < ROUNDING
    assert found_in_float32["slices_error"] < ROUNDING_FLOAT32


def test_scattered_tokens_are_mended_in_place_and_see_each_other(
    found: dict[str, Any], found_in_float32: dict[str, Any]
) -> None:
    assert found["spoiled_error"] > 100 * ROUNDING
    assert found["scattered_error"] < ROUNDING
    assert found_in_float32["scattered_error"] < ROUNDING_FLOAT32


def test_more_than_a_pass_takes_is_refused(found: dict[str, Any]) -> None:
    assert "2049 tokens in 1 runs" in found["refusal"]


def test_observed_attention_is_that_of_another_implementation(found: dict[str, Any]) -> None:
    observed, wanted = np.array(found["observed"]), np.array(found["reference"]["observed"])
    assert observed.shape == (219, 4)
    np.testing.assert_allclose(observed.sum(1), 1, atol=1e-3)
    np.testing.assert_allclose(observed, wanted, atol=0.05)  # the engine's numbers are bfloat16
    assert np.abs(observed - wanted).mean() < 0.02 * wanted.std()


def test_influence_is_that_of_another_implementation(found: dict[str, Any]) -> None:
    influence, wanted = np.array(found["influence"]), np.array(found["reference"]["influence"])
    assert influence.shape == (219,)
    assert wanted.std() > 0.1 * wanted.mean()  # so that this says something
    assert np.abs(influence - wanted).mean() < 0.1 * wanted.std()


def test_what_a_question_looks_at_is_that_of_another_implementation(found: dict[str, Any]) -> None:
    scores = np.array(found["question_attention"])
    wanted = np.array(found["reference"]["question_attention"])
    assert scores.shape == (480,)
    assert wanted.std() > 0.1 * wanted.mean()
    assert np.abs(scores - wanted).mean() < 0.1 * wanted.std()


def test_the_first_chunk_is_under_no_influence(found: dict[str, Any]) -> None:
    assert found["influence_of_nothing"] == 0


def test_observing_changes_no_kv(found: dict[str, Any]) -> None:
    assert found["unchanged_by_observing"]


def test_parts_of_two_prompts_share_a_pass(found: dict[str, Any]) -> None:
    assert found["together_error"] < ROUNDING
    assert found["beside_error"] < ROUNDING


def test_two_hooks_see_the_same_pass(found: dict[str, Any]) -> None:
    """The question pays the rest of its attention to its own tokens."""
    assert found["same_with_two_hooks"]
    assert len(found["attention_by_layer"]) == 4
    question_tokens = 40
    for layer in found["attention_by_layer"]:
        assert all(score > 0 for score in layer)
        assert question_tokens / 2 < sum(layer) < question_tokens
