"""The connector's worker on a simulated GPU: no step waits for it, and launches are few.

The program has a real store, the real worker and passes through the real recomputer. It compares
all loaded and moved bits with those of a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.device.packages import ROOT

STEPS = ("save", "load", "move", "blend", "observe")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last line of a dry run of this group alone."""
    logs = tmp_path_factory.mktemp("logs")
    command = ["tools/device/run.py", "--dry", "--only", "worker", "--logs", str(logs)]
    done = subprocess.run(
        [sys.executable, *command, "--limit", "280"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    log = (logs / "worker.log").read_text()[-3000:]
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-1000:], log)
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def test_no_step_waits_for_the_device(found: dict[str, Any]) -> None:
    [stage] = found["stages"].values()
    waits = {name: step["waits_at"] for name, step in stage["steps"].items()}
    assert waits == {name: {} for name in STEPS}
    assert found["host_waits"] == dict.fromkeys(STEPS, 0)


def test_a_load_writes_each_layer_once_however_many_chunks_it_has(found: dict[str, Any]) -> None:
    [stage] = found["stages"].values()
    for name in ("load", "move"):
        assert found["cache_writes"][name] == stage["layers"]
    # One copy puts a chunk beside the others, and one kernel rotates it.
    assert found["launches"]["load"] <= stage["chunks"]
    assert found["launches"]["move"] <= 2 * stage["chunks"]
    # One for each chunk, another for the rotation's table, and one for all slots.
    assert found["copies"]["load"] <= stage["chunks"] + 1
    assert found["copies"]["move"] <= 2 * stage["chunks"] + 1


def test_layers_that_rotate_differently_are_moved_a_few_at_a_time(tmp_path: Path) -> None:
    """The program compares bits with those that the CPU rotates."""
    command = ["-m", "tools.device.stages.worker_steps", "--folder", str(tmp_path), "--one-layer"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])


def test_a_save_reads_each_layer_once_however_many_chunks_it_has(found: dict[str, Any]) -> None:
    [stage] = found["stages"].values()
    assert found["launches"]["save"] <= stage["layers"] + stage["chunks"]
    assert found["copies"]["save"] <= stage["chunks"] + 1


def test_a_blend_copies_what_a_pass_needs_together(found: dict[str, Any]) -> None:
    # Beside the load: two passes, the shift, the question's places and its attention.
    assert found["copies"]["blend"] <= found["copies"]["move"] + 6
