"""Plugins of vLLM made where they are needed, for engines that are to be unlike a usual one."""

from __future__ import annotations

import os
from pathlib import Path

WAITS_ASLEEP = """
import time


def register():
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(50e-6)
"""
"""vLLM's processes wait for one another asleep. They do it by ``sched_yield`` without end, and
Linux 6.18 then leaves what shares their core without any CPU for seconds at a time: the API server,
and whoever measures. Whether it does is chance, and differs from one minute to the next."""


def plugin_settings(folder: Path, source: str) -> dict[str, str]:
    """Write a package to ``folder`` whose ``register`` vLLM calls in each of its processes.

    source: of its only module. Returns the environment in which an engine finds it.
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
