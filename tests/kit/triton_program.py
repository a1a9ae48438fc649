"""Runs test files as programs, since Triton reads its environment only at import."""

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
TIMEOUT_S = 280.0
"""Less than the limit of a test. Half a minute is usual."""


def as_a_program(file: str, **environment: str) -> Any:
    """Run file in its own process and return the JSON on its last line. Skips without Triton."""
    if any(importlib.util.find_spec(name) is None for name in ("triton", "torch")):
        pytest.skip("Triton is not installed")
    search_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, file],
        env={**os.environ, "PYTHONPATH": search_path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
