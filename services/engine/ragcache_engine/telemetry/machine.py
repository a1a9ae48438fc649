"""What a profile was taken on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def machine(device: torch.device) -> str:
    """Name of the processor that a model runs on, and how much of it there is."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
