"""``make demo``'s own path, unattended, on the bundled model and a few documents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.pydoc_pages import render

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("csv", "gzip", "shutil", "tempfile")
QUESTIONS = (
    "How do I copy a directory tree with shutil?",
    "How do I create a temporary directory with tempfile?",
)


@pytest.mark.timeout(900)
def test_the_demo_answers_cold_from_the_store_and_blended(tmp_path: Path) -> None:
    for name in MODULES:
        text = render(name)
        assert text is not None
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "questions").write_text("\n".join(QUESTIONS) + "\n")
    command = [sys.executable, "examples/demo.py", "--docs", str(tmp_path)]
    done = subprocess.run(
        [*command, "--questions", str(tmp_path / "questions")],
        cwd=ROOT,
        env={**os.environ, "DEMO": "once"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Milliseconds to the first token" in done.stdout
    assert "shutil.txt" in done.stdout
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["documents"] == len(MODULES)
    assert figures["chunks"] > len(MODULES)
    assert figures["questions"] == len(QUESTIONS)
    assert figures["mixed_questions"] == 1
    assert figures["warm_loaded_tokens"] > 1000
    assert figures["warm_ratio"] > 1.5
