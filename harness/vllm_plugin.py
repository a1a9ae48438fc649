"""Writes vLLM plugins for engines that a benchmark needs to behave differently."""

from __future__ import annotations

import os
from pathlib import Path

WAITS_ASLEEP = """
import time


def register():
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(50e-6)
"""
"""Makes vLLM's processes sleep while they wait for each other. By default they call ``sched_yield``
in a loop. Linux 6.18 can then starve other processes on their core for seconds at a time, such as
the
API server and the benchmark. It happens by chance and changes from minute to minute."""


def plugin_settings(folder: Path, source: str) -> dict[str, str]:
    """Write a package whose ``register`` vLLM calls in each of its processes.

    Args:
        folder: Where the package is written.
        source: The source of its only module.

    Returns:
        The environment with which an engine finds it.
    """
    known = folder / "engine_plugin-1.dist-info"
    known.mkdir(parents=True)
    (folder / "engine_plugin.py").write_text(source)
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-plugin\nVersion: 1\n")
    (known / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nengine_plugin = engine_plugin:register\n"
    )
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([others] if others else [])])}
