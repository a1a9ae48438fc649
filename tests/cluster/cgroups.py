"""The control groups that the kubelet puts pods into: a tree of our own, beside any other's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from harness.availability import Unavailable

NAME = "ragcache-test"
_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = "+cpu +cpuset +memory +pids"


def make_tree() -> None:
    """Make our group in every hierarchy; raises Unavailable if we may not."""
    try:
        for hierarchy in _hierarchies():
            _make_group(hierarchy)
    except OSError as problem:
        raise Unavailable(f"no control groups for a cluster's pods here: {problem}") from problem


def machine_group() -> Path:
    """A group for the machine's first process, which ends after all others of the machine."""
    # An empty cpuset would refuse it.
    hierarchy = min(_hierarchies(), key=lambda one: (one / "cpuset.cpus").exists())
    group = hierarchy / NAME / "machine"
    group.mkdir(exist_ok=True)
    return group


def _make_group(hierarchy: Path) -> None:
    group = hierarchy / NAME
    if _is_version_2():
        # Groups have the controllers that the group above hands down.
        (hierarchy / "cgroup.subtree_control").write_text(_CONTROLLERS)
        group.mkdir(exist_ok=True)
        (group / "cgroup.subtree_control").write_text(_CONTROLLERS)
        return
    group.mkdir(exist_ok=True)
    for setting in ("cpuset.mems", "cpuset.cpus"):
        # A new cpuset is empty, and nothing may run in an empty one.
        if (group / setting).exists():
            (group / setting).write_text((hierarchy / setting).read_text())


def remove_tree(limit_s: float = 60) -> None:
    """Remove our groups; the processes in them must have ended or be about to."""
    deadline = time.monotonic() + limit_s
    for hierarchy in _hierarchies():
        while (hierarchy / NAME).exists():
            try:
                for group in _deepest_first(hierarchy / NAME):
                    group.rmdir()
            except OSError:  # a process in it is still on its way out
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def processes() -> set[int]:
    """Processes in any of our groups."""
    found: set[int] = set()
    for hierarchy in _hierarchies():
        if (hierarchy / NAME).exists():
            for group in _deepest_first(hierarchy / NAME):
                found.update(map(int, (group / "cgroup.procs").read_text().split()))
    return found


def _is_version_2() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


def _hierarchies() -> Iterator[Path]:
    """Roots of all hierarchies: one in cgroup version 2, one per controller in version 1."""
    if _is_version_2():
        yield _ROOT
        return
    seen = set()
    for path in sorted(_ROOT.iterdir()):
        # cpu and cpuacct may be two names of one hierarchy.
        if path.resolve() not in seen and (path / "cgroup.procs").exists():
            seen.add(path.resolve())
            yield path.resolve()


def _deepest_first(group: Path) -> Iterator[Path]:
    for child in sorted(group.iterdir()):
        if child.is_dir():
            yield from _deepest_first(child)
    yield group
