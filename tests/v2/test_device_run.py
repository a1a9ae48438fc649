"""The program that checks a GPU, run on the CPU: with vLLM's runner for CPUs and for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.v2.settings import v2_settings
from tools.device.packages import ROOT

pytestmark = [pytest.mark.v2, pytest.mark.timeout(900)]

LENGTHS = (256, 512)
NEEDS_A_GPU = ["card", "flash attention", "host memory"]
NOT_BUILT = {"store_registered", "blend15_merged"}
CHECKS = ("save, reset, load", "blend 0 %", "blend 100 %", "abort", "failed load")


def run_dry(logs: Path, env: Mapping[str, str], *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "tools/device/run.py", "--dry", "--logs", str(logs), *arguments]
    done = subprocess.run(
        [*command, "--limit", "800"],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    tails = {log.name: log.read_text()[-2000:] for log in logs.glob("*.log")}
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-2000:], tails)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_dry_run_passes_every_stage_that_needs_no_gpu(tmp_path: Path) -> None:
    found = run_dry(tmp_path, {})
    assert (found["stages_failed"], found["stages_skipped"]) == (0, NEEDS_A_GPU)
    stages = found["stages"]
    assert found["stages_passed"] == len(stages) - len(NEEDS_A_GPU)
    assert {f"engine A: {check}" for check in CHECKS} <= set(stages)
    assert stages["plain torch"]["figures"]["gpu"] is None
    for length in LENGTHS:
        times = stages[f"engine B: first token, {length}"]["ttft_ms"]
        assert {way for way, ms in times.items() if ms == "not built"} == NOT_BUILT
        assert all(ms > 0 for way, ms in times.items() if way not in NOT_BUILT)
    assert set(stages["engine B: eight others decode"]["gaps"]) >= {"alone", "store", "blend15"}
    assert set(stages["engine B: host waits"]) >= {"alone", "store", "blend15"}


@pytest.mark.parametrize(
    "asynchronous",
    [
        pytest.param(True, id="two steps in flight"),
        pytest.param(False, id="one step", marks=pytest.mark.slow),
    ],
)
def test_the_runner_of_gpus_computes_the_same_bits(tmp_path: Path, asynchronous: bool) -> None:
    settings = v2_settings(asynchronous=asynchronous)
    found = run_dry(tmp_path, settings, "--only", "engine-a")
    start = found["stages"]["engine A: start"]
    assert start["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert (start["async_scheduling"], start["blends"]) == (asynchronous, True)
    assert set(found["stages"]) >= {f"engine A: {check}" for check in CHECKS}
