"""Test files as programs: Triton reads its environment once, as it is imported."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0


def as_a_program(file: str, **environment: str) -> Any:
    """The JSON that file prints last, run in a process of its own; skips without Triton."""
    if any(importlib.util.find_spec(name) is None for name in ("triton", "torch")):
        pytest.skip("Triton is not installed")
    found_in = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, file],
        env={**os.environ, "PYTHONPATH": found_in, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
