"""What is packed for a GPU machine has a pinned version, and leaves out what is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.device.packages import LIBRARIES, PACKAGES, is_needed, requirements, wheel_of


def test_each_package_is_pinned_once() -> None:
    wanted = requirements()
    assert len(wanted) == len(set(wanted)) == len(PACKAGES) + 1
    assert wanted[0].startswith("vllm==")
    assert all(one.count("==") == 1 for one in wanted)


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        ("vllm/v1/engine/core.py", True),
        ("vllm-0.32.0.dist-info/METADATA", True),
        ("vllm/model_executor/layers/fused_moe/configs/E=8,N=4.json", True),
        ("vllm/third_party/deep_gemm/include/cutlass/matrix.h", False),
        ("vllm/vllm-rs", False),
        ("vllm/benchmarks/serve.py", False),
        *((name, False) for name in LIBRARIES),
    ],
)
def test_files_of_vllm(path: str, needed: bool) -> None:
    assert is_needed(path) is needed


def test_a_wheel_is_found_by_its_normalized_name_and_version() -> None:
    names = ("pydantic_core-2.1-cp312-cp312-linux.whl", "pydantic-2.1-py3-none-any.whl")
    wheels = [Path(name) for name in names]
    assert wheel_of("pydantic-core==2.1", wheels) == wheels[0]
    assert wheel_of("pydantic==2.1", wheels) == wheels[1]
    assert wheel_of("pydantic==2.2", wheels) is None
