"""Run the checks and tests in stages, fastest first, and print how long each stage took.

::

    python -m tools.test_stages [--only STAGE ...] [--slow]

A stage that fails keeps no other stage from running. CI runs the same stages.

Up to MAX_RETRIED tests of a stage that failed run a second time, one after the other and with the
machine for themselves. The summary names those that pass then as unsteady: each one is a defect
of the test or of the product.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FAILED: Final = ROOT / ".pytest_cache/v/cache/lastfailed"
MAX_RETRIED: Final = 3
TESTS_FAILED: Final = 1  # pytest's exit status; errors of pytest itself have others
SOURCES: Final = "core wire kv operator services cli tests harness bench tools examples models"
# Two test files at a time: an engine's start keeps one core busy, and no more. The longest files
# come first, so that no core is idle at the end.
BY_TWOS: Final = "-n 2 --dist loadfile --no-loadscope-reorder"


@dataclass(frozen=True, slots=True)
class Stage:
    """Commands that run two at a time."""

    name: str
    commands: tuple[str, ...]


STAGES: Final = (
    Stage(
        "check",
        (
            "mypy",  # as long as all others
            f"ruff format --check {SOURCES}",
            f"ruff check {SOURCES}",
            "codespell",
            "lint-imports",
            "python tools/generate_wire.py --check",
            "python tools/generate_crds.py --check",
            "python tools/generate_chart.py --check",
            "python tools/generate_settings.py --check",
            "python tools/generate_metrics.py --check",
            "python -m tools.dashboards --static",
            "python -m tools.prose",
            "python -m tools.house --check",
        ),
    ),
    Stage("unit", ("python -m pytest -n logical --durations=10 tests/unit",)),
    Stage("build Kubernetes", ("python -m harness.cluster.binaries",)),
    Stage(
        "integration, end to end",
        (
            f"python -m pytest {BY_TWOS} --durations=30 -m 'not slow'"
            " tests/e2e tests/v2 tests/gpu tests/integration tests/attack",
        ),
    ),
    Stage("dashboards", ("python -m tools.dashboards --check",)),
    Stage("cluster", ("python -m pytest --durations=10 -m 'not slow' tests/cluster",)),
)
SLOW: Final = (
    Stage("build Kubernetes", ("python -m harness.cluster.binaries",)),
    Stage(
        "slow tests",
        (
            "python -m pytest -m slow"
            " tests/integration tests/attack tests/v2 tests/e2e tests/cluster",
        ),
    ),
    Stage(
        "vLLM 0.31",
        (
            ".venv-vllm-0.31/bin/python -m pytest tests/unit/engine"
            " tests/integration/engine/test_vllm.py tests/integration/engine/test_blend.py"
            " tests/integration/engine/test_recomputing.py"
            " tests/integration/engine/test_handoff.py",
        ),
    ),
    Stage("soak", ("python -m bench.soak",)),
)


def run(stage: Stage, unsteady: list[str]) -> bool:
    """Run the commands, of the environment this Python belongs to unless they name another one.

    Tests that pass at their second run are added to ``unsteady``.
    """
    if len(stage.commands) == 1:
        print(f"$ {stage.commands[0]}", flush=True)
        FAILED.unlink(missing_ok=True)
        status = _run(stage.commands[0]).returncode
        failed = failed_tests() if status == TESTS_FAILED else []
        if not 0 < len(failed) <= MAX_RETRIED:
            return status == 0
        again = f"{stage.commands[0].split()[0]} -m pytest {shlex.join(failed)}"
        print(f"$ {again}", flush=True)
        if _run(again).returncode != 0:
            return False
        unsteady += failed
        return True
    passed = True
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(partial(_run, stdout=subprocess.PIPE), stage.commands)
        for command, done in zip(stage.commands, ended, strict=True):
            print(f"$ {command}\n{done.stdout}", end="", flush=True)
            passed &= done.returncode == 0
    return passed


def failed_tests() -> list[str]:
    """Return the tests that failed in the last run of pytest."""
    return sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []


def _run(command: str, stdout: int | None = None) -> subprocess.CompletedProcess[str]:
    program, *words = shlex.split(command)
    path = ROOT / program if "/" in program else Path(sys.executable).with_name(program)
    return subprocess.run(
        [str(path), *words],
        cwd=ROOT,
        check=False,
        text=True,
        stdout=stdout,
        stderr=subprocess.STDOUT,
    )


def main() -> int:
    """Run the stages; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description="Run checks and tests in stages.")
    parser.add_argument("--only", nargs="*", help="names of the stages to run", default=[])
    parser.add_argument("--slow", action="store_true", help="the slow tests in place of the others")
    given = parser.parse_args()
    stages = SLOW if given.slow else STAGES
    taken: list[tuple[str, float, bool]] = []
    unsteady: list[str] = []
    for stage in stages:
        if given.only and stage.name not in given.only:
            continue
        started_s = time.monotonic()
        passed = run(stage, unsteady)
        taken.append((stage.name, time.monotonic() - started_s, passed))
    print("\nstage                       time")
    for name, seconds, passed in taken:
        minutes, rest = divmod(round(seconds), 60)
        print(f"{name:<26} {minutes:3d}:{rest:02d}{'' if passed else '  failed'}")
    minutes, rest = divmod(round(sum(seconds for _, seconds, _ in taken)), 60)
    print(f"{'all':<26} {minutes:3d}:{rest:02d}", flush=True)
    for test in unsteady:
        print(f"unsteady: {test}", flush=True)
    return 0 if all(passed for _, _, passed in taken) else 1


if __name__ == "__main__":
    sys.exit(main())
