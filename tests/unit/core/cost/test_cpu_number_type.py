"""Which number types a processor multiplies fast."""

from __future__ import annotations

import pytest

from ragcache_core.cost.cpu_number_type import is_slow_number_type, parse_cpu_features

AVX2 = {"avx2", "fma", "avx"}
AVX512 = {*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.mark.parametrize(
    ("number_type", "features", "is_slow"),
    [
        ("bfloat16", AVX2, True),
        ("float16", AVX2, True),
        ("float32", AVX2, False),
        ("bfloat16", {*AVX2, "avx512f"}, True),
        ("bfloat16", AVX512, False),
        ("bfloat16", {"asimd", "bf16"}, False),
        ("bfloat16", {"asimd"}, True),
        ("bfloat16", None, False),
    ],
)
def test_16_bits_are_slow_without_instructions_for_them(
    number_type: str, features: set[str] | None, is_slow: bool
) -> None:
    assert is_slow_number_type(number_type, features) is is_slow


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: x\n", {"fpu", "avx2"}),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", {"fp", "asimd", "bf16"}),
        ("nothing of it\n", None),
    ],
)
def test_the_first_processor_counts(text: str, features: set[str] | None) -> None:
    assert parse_cpu_features(text) == features
