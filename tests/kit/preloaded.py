"""Libraries that processes of a test load first, so that they replace functions of libc."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def preloaded_library(folder: Path, source: str) -> dict[str, str]:
    """Compile C source, and return the variables with which a process loads it first."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    file, library = folder / "preloaded.c", folder / "preloaded.so"
    file.write_text(source)
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), str(file)]
    subprocess.run([*command, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}
