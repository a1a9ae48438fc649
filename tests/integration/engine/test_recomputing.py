"""Recomputation passes through the model inside a real vLLM engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import processes
from ragcache_core.blend.chunk_shift import SHIFT_FACTOR
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(900)

ROUNDING = 0.01
"""Relative error of sums in another order. bfloat16 has about three decimal digits."""

ROUNDING_FLOAT32 = 1e-5
"""float32 has about seven digits, so one missing token among hundreds would be visible."""


def run_inside(folder: Path, model: Path, dtype: str) -> dict[str, Any]:
    """Return the result of ``engine_inside``, which runs vLLM in its own process."""
    result, log = folder / "result.json", folder / "log"
    command = [sys.executable, "-m", "tests.integration.engine.engine_inside"]
    command += [str(model), dtype, str(result)]
    inside = processes.Service("engine", command, {}, log, processes.engine_forks)
    try:
        wait_until(lambda: inside.has_ended, "result", timeout_s=600)
    finally:
        inside.kill()
    assert result.exists(), log.read_text()[-4000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Findings in the model's own type."""
    return run_inside(tmp_path_factory.mktemp("bfloat16"), tiny_model, "bfloat16")


@pytest.fixture(scope="module")
def found_in_float32(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_inside(tmp_path_factory.mktemp("float32"), tiny_model, "float32")


def test_recomputing_a_whole_prompt_gives_the_bits_of_a_prefill(found: dict[str, Any]) -> None:
    assert found["whole_equals_prefill"]


def test_a_model_that_takes_embeddings_gets_those_of_the_tokens(found: dict[str, Any]) -> None:
    assert found["embedded_equals_prefill"]


def test_recomputing_in_pieces_gives_the_bits_of_a_prefill_in_pieces(
    found: dict[str, Any], found_in_float32: dict[str, Any]
) -> None:
    assert found["pieces_equal_prefill"]
    assert found_in_float32["pieces_equal_prefill"]


def test_recomputing_in_slices_equals_a_prefill(
    found: dict[str, Any], found_in_float32: dict[str, Any]
) -> None:
    assert found["slices_error"] < ROUNDING
    assert found_in_float32["slices_error"] < ROUNDING_FLOAT32


def test_scattered_tokens_are_recomputed_and_attend_to_each_other(
    found: dict[str, Any], found_in_float32: dict[str, Any]
) -> None:
    assert found["corrupted_error"] > 100 * ROUNDING
    assert found["scattered_error"] < ROUNDING
    assert found_in_float32["scattered_error"] < ROUNDING_FLOAT32


def test_more_tokens_than_a_pass_takes_are_refused(found: dict[str, Any]) -> None:
    assert "2049 tokens in 1 runs" in found["refusal"]


def test_a_config_with_another_rotation_is_refused(
    found: dict[str, Any], found_in_float32: dict[str, Any]
) -> None:
    assert "its layer 0 rotates keys in another way" in found["wrong_rotation"]
    assert "its layer 0 rotates keys in another way" in found_in_float32["wrong_rotation"]


def test_observed_attention_equals_another_implementation(found: dict[str, Any]) -> None:
    observed, expected = np.array(found["observed"]), np.array(found["reference"]["observed"])
    assert observed.shape == (219, 4)
    np.testing.assert_allclose(observed.sum(1), 1, atol=1e-3)
    np.testing.assert_allclose(observed, expected, atol=0.05)  # the engine computes in bfloat16
    assert np.abs(observed - expected).mean() < 0.02 * expected.std()


def test_influence_equals_another_implementation(found: dict[str, Any]) -> None:
    influence, expected = np.array(found["influence"]), np.array(found["reference"]["influence"])
    assert influence.shape == (219,)
    assert expected.std() > 0.1 * expected.mean()  # so that the comparison is meaningful
    assert np.abs(influence - expected).mean() < 0.1 * expected.std()


def test_question_attention_equals_another_implementation(found: dict[str, Any]) -> None:
    scores = np.array(found["question_attention"])
    expected = np.array(found["reference"]["question_attention"])
    assert scores.shape == (480,)
    assert expected.std() > 0.1 * expected.mean()
    assert np.abs(scores - expected).mean() < 0.1 * expected.std()


def test_a_chunk_is_shifted_by_what_its_recomputed_tokens_changed(
    found: dict[str, Any], found_in_float32: dict[str, Any]
) -> None:
    for left in found_in_float32["left_of_shift"]:
        assert left == pytest.approx(1 - SHIFT_FACTOR, abs=0.001)
    for left in found["left_of_shift"]:
        assert left == pytest.approx(1 - SHIFT_FACTOR, abs=0.02)
    assert found["outside_of_shift_is_equal"]
    assert found_in_float32["outside_of_shift_is_equal"]


def test_nothing_influences_the_first_chunk(found: dict[str, Any]) -> None:
    assert found["influence_of_nothing"] == 0


def test_observing_changes_no_kv(found: dict[str, Any]) -> None:
    assert found["unchanged_by_observing"]


def test_slices_of_two_prompts_share_a_pass(found: dict[str, Any]) -> None:
    assert found["together_error"] < ROUNDING
    assert found["shared_pass_error"] < ROUNDING


def test_a_pass_of_vllm_recomputes_tokens_of_another_prompt(
    found: dict[str, Any], found_in_float32: dict[str, Any]
) -> None:
    assert found["joint_error_before"] > 100 * ROUNDING
    assert found["joint_error"] < ROUNDING
    assert found_in_float32["joint_error"] < ROUNDING_FLOAT32
    assert found["same_answer_beside_joint_pass"]


def test_a_pass_of_vllm_goes_on_without_slices_that_fail(found: dict[str, Any]) -> None:
    """They are reported, so that vLLM recomputes their blocks."""
    broken = [299, 420]
    assert found["broken"]["blocks"] == [True, [[0, 9], broken]]
    assert found["broken"]["tokens"] == [True, [[0, 9], broken]]
    # Slices that do not fit the pass are computed one by one.
    assert found["broken"]["size"] == [True, [[0, 700]]]


def test_two_hooks_see_the_same_pass(found: dict[str, Any]) -> None:
    """The rest of the question's attention goes to its own tokens."""
    assert found["same_with_two_hooks"]
    # Of four layers, the second and third give the question's attention. There the pass ends.
    assert len(found["attention_by_layer"]) == 3
    question_tokens = 40
    for layer in found["attention_by_layer"]:
        assert all(score > 0 for score in layer)
        assert question_tokens / 2 < sum(layer) < question_tokens
