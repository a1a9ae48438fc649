"""``make demo``'s own path, unattended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_the_demo_answers_right_cold_and_from_the_store() -> None:
    done = subprocess.run(
        [sys.executable, "examples/demo.py"],
        cwd=ROOT,
        env={**os.environ, "DEMO": "once", "DEMO_SEED": "7"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Milliseconds to the first token" in done.stdout
    assert sum(line.endswith("  right") for line in done.stdout.splitlines()) >= 4
