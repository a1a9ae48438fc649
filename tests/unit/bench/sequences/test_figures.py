"""Figures of a contestant from what was measured of its requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.support.sequences.figures import Measured, contestant_figures
from ragcache_wire.v1 import engine_pb2

RECORD = engine_pb2.RequestRecord(
    queue_s=0.01,
    load_s=0.05,
    recompute_s=0.03,
    select_s=0.005,
    prefill_s=0.02,
    prompt_tokens=1000,
    local_tokens=200,
    loaded_tokens=700,
    loaded_bytes=4096,
    blended_tokens=600,
    recomputed_tokens=90,
)
BLENDED = Measured(0.12, 1000, 900, record=RECORD)


def test_tokens_by_origin_add_up_to_the_prompt() -> None:
    assert BLENDED.tokens_by_origin() == {
        "vllm_cache": 200,
        "loaded_exact": 100,
        "loaded_blended": 510,
        "recomputed": 90,
        "computed": 100,
    }


def test_without_a_record_vllm_tells_what_was_cached() -> None:
    assert Measured(1.0, 100, 32).tokens_by_origin() == {"vllm_cache": 32, "computed": 68}


def test_stages_add_up_to_the_time_to_first_token() -> None:
    stages = BLENDED.seconds_by_stage()
    assert stages["load"] == pytest.approx(0.02)
    assert stages["select"] == pytest.approx(0.005)
    assert stages["recompute"] == pytest.approx(0.025)
    assert stages["server"] == pytest.approx(0.04)
    assert sum(stages.values()) == pytest.approx(0.12)


def test_figures_of_a_contestant() -> None:
    record = engine_pb2.RequestRecord(prompt_tokens=1000, prefill_s=0.35, miss="not stored")
    computed = Measured(0.4, 1000, 0, record=record)
    found = contestant_figures([replace(BLENDED, cpu_s=1.0), replace(computed, cpu_s=2.0)])
    assert found["ttft_mean_s"] == 0.26
    assert found["blended_requests"] == 1
    assert found["misses"] == {"none": 1, "not stored": 1}
    assert found["blended"]["mean_ms_by_stage"]["load"] == 20
    assert found["mean_ms_by_stage"]["load"] == 10
    assert found["tokens_by_origin"]["computed"] == 1100
    assert found["cpu_s_per_request"] == 1.5
    assert found["loaded_bytes"] == 4096


def test_figures_without_records() -> None:
    found = contestant_figures([Measured(0.4, 100, 0)])
    assert "blended" not in found
    assert found["ttft_p95_s"] == 0.4
