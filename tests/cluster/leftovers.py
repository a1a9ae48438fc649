"""What a killed test leaves of its cluster: processes about to die, control groups, files."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from tests.cluster import cgroups

_PATIENCE_S = 10


def clear(folder: Path) -> None:
    """Bring the host back to how it was before a cluster in this folder started.

    The caller holds the lock that says that no cluster runs. Processes die with their test by
    themselves; what is still there after a while is killed, one pid at a time.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while pids := processes_of(folder):
        if time.monotonic() > deadline:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            deadline += _PATIENCE_S
        time.sleep(0.1)
    cgroups.remove_tree()
    if mounts := mounts_under(folder):
        # They would have to be another mount namespace's; removing files through one is fatal.
        raise RuntimeError(f"something is mounted under {folder}: {mounts}")
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def processes_of(folder: Path) -> set[int]:
    """Processes of a cluster: in its control groups, or with its folder on their command line."""
    found = cgroups.processes()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        if any(_names(word, os.fsencode(folder)) for word in words):
            found.add(int(path.parent.name))
    return found - {os.getpid()}


def mounts_under(folder: Path) -> list[str]:
    """Mount points on this host below a folder."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if Path(point).is_relative_to(folder)]


def _names(word: bytes, folder: bytes) -> bool:
    """Whether a word is the folder, or a flag with a path in it."""
    return word == folder or word.startswith((folder + b"/",)) or b"=" + folder + b"/" in word
