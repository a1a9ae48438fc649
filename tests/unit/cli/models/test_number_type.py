"""The number type of a local platform's model."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_cli.models.number_type import read_cpu_features, use_fast_number_type
from ragcache_operator.spec.manifest import load_manifest
from ragcache_operator.spec.ragcache import EngineSpec, RagCache

QUICKSTART = Path(__file__).resolve().parents[4] / "examples" / "quickstart.yaml"
AVX2 = {"avx2", "fma", "avx"}


def with_dtype(dtype: str) -> RagCache:
    return RagCache.model_validate(
        {
            "apiVersion": "ragcache.dev/v1alpha1",
            "kind": "RagCache",
            "metadata": {"name": "one"},
            "spec": {"model": {"dtype": dtype}, "engines": [{"name": "main"}]},
        }
    )


@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        (AVX2, "float32"),
        ({"asimd", "bf16"}, "auto"),
        (None, "auto"),
    ],
)
def test_auto_is_float32_where_bfloat16_is_slow(features: set[str] | None, dtype: str) -> None:
    before = load_manifest(QUICKSTART)
    after = use_fast_number_type(before, features)
    assert after.spec.model.dtype == dtype
    assert after.spec.engines == before.spec.engines


def test_engines_on_gpus_compute_16_bits() -> None:
    before = load_manifest(QUICKSTART)
    engines = (EngineSpec(device="cuda"),)
    on_gpu = before.model_copy(update={"spec": before.spec.model_copy(update={"engines": engines})})
    assert use_fast_number_type(on_gpu, AVX2).spec.model.dtype == "auto"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_named_number_type_stays(dtype: str) -> None:
    assert use_fast_number_type(with_dtype(dtype), AVX2).spec.model.dtype == dtype


def test_the_processor_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("flags\t\t: fpu avx2\n")
    assert read_cpu_features(file) == {"fpu", "avx2"}


def test_a_system_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert read_cpu_features(tmp_path / "none") is None
