"""The release before this one, out of the repository's own history."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import yaml

from harness.availability import Unavailable

ROOT = Path(__file__).resolve().parents[2]
_CHART = "charts/ragcache-operator/Chart.yaml"


def chart_version(text: str | bytes) -> str:
    """The version in a Chart.yaml."""
    version: str = yaml.safe_load(text)["version"]
    return version


def previous_release(folder: Path) -> tuple[str, Path]:
    """Version and checkout of the last commit before the chart got its present version.

    Raises Unavailable where there is no such commit, as in a clone without history.
    """
    now = chart_version((ROOT / _CHART).read_bytes())
    commit = "HEAD"
    for changed in _git("log", "--format=%H", "--", _CHART).decode().split():
        if chart_version(_git("show", f"{changed}:{_CHART}")) != now:
            break
        commit = f"{changed}^"
    else:
        raise Unavailable(f"no commit of this clone has a chart before {now}; fetch its history")
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
        archive.extractall(folder, filter="data")
    return chart_version((folder / _CHART).read_bytes()), folder


def _git(*words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"git {words[0]}: {done.stderr.decode().strip()}")
    return done.stdout
