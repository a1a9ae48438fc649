"""Engines whose processor computes the model's number type slowly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ragcache_engine.telemetry.processor import describe_processor

AVX2 = "flags\t: avx avx2 fma\n"
AVX512 = "flags\t: avx512f avx512bw avx512vl avx512dq\n"


@pytest.mark.parametrize(
    ("number_type", "device", "flags", "is_slow"),
    [
        ("bfloat16", "cpu", AVX2, True),
        ("bfloat16", "cpu", AVX512, False),
        ("float32", "cpu", AVX2, False),
        ("bfloat16", "cuda", AVX2, False),
    ],
)
def test_a_number_type_is_slow_on_a_processor_without_its_instructions(
    tmp_path: Path, number_type: str, device: str, flags: str, is_slow: bool
) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(flags)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=f"torch.{number_type}"),
        device_config=SimpleNamespace(device_type=device),
    )
    found = describe_processor(config, cpu_info)
    assert found == {"number_type": number_type, "is_slow": is_slow}


def test_a_system_that_says_nothing_is_not_slow(tmp_path: Path) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype="torch.bfloat16"),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    assert describe_processor(config, tmp_path / "none")["is_slow"] is False
