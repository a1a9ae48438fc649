"""Tells whether an engine's processor computes the model's number type fast.

The engine alone knows both: its node has the processor, and vLLM has resolved ``--dtype auto``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ragcache_core.cost.cpu_number_type import is_slow_number_type, parse_cpu_features

_CPU_INFO: Final = Path("/proc/cpuinfo")


def describe_processor(vllm_config: Any, cpu_info: Path = _CPU_INFO) -> dict[str, str | bool]:
    """Return the model's number type, and whether the processor computes it slowly.

    Args:
        vllm_config: vLLM's configuration of the engine.
    """
    number_type = str(vllm_config.model_config.dtype).removeprefix("torch.")
    is_cpu = vllm_config.device_config.device_type == "cpu"
    features = parse_cpu_features(cpu_info.read_text()) if is_cpu and cpu_info.is_file() else None
    return {"number_type": number_type, "is_slow": is_slow_number_type(number_type, features)}
