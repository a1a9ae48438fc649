"""Families of models in a real vLLM: which blend, reuse exact prefixes, or are refused, and why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.models.families import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DOCUMENTATION = Path(__file__).parents[3] / "docs/models.md"
MIN_BLEND = 12
NOT_BLENDED = {
    "mistral, window": "SlidingWindowSpec",
    "gemma4": "differ in their KV shape",
    "deepseek_v3": "latent attention",
    "qwen3_5": "Mamba or linear attention",
}
"""Families that are refused, with a part of the reason."""

ONLY_EXACT = {"opt": "of type 'opt' is unknown", "llama4": "attend in 2 ways"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of the check of all families."""
    folder = str(tmp_path_factory.mktemp("families"))
    argv = [sys.executable, "-m", "tools.models", "--check", "--folder", folder]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*NOT_BLENDED, *ONLY_EXACT}))
def test_a_family_blends_as_a_full_computation(found: dict[str, Any], family: str) -> None:
    outcome = found["families"][family]
    may_lack_vllm = FAMILIES[family].reads_images
    assert outcome["kind"] in ("blend", "reference" if may_lack_vllm else "blend"), outcome


@pytest.mark.parametrize("family", ONLY_EXACT)
def test_keys_that_cannot_be_moved_serve_exact_prefixes(found: dict[str, Any], family: str) -> None:
    outcome = found["families"][family]
    assert outcome["kind"] == "exact"
    assert ONLY_EXACT[family] in outcome["reason"]


@pytest.mark.parametrize("family", NOT_BLENDED)
def test_a_family_is_refused_with_the_cause(found: dict[str, Any], family: str) -> None:
    outcome = found["families"][family]
    assert outcome["kind"] == "refused"
    assert NOT_BLENDED[family] in outcome["reason"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_documentation_has_a_family_among_those_of_its_outcome(
    found: dict[str, Any], family: str
) -> None:
    heading = {
        "blend": "Families that blend",
        "reference": "Families that blend",
        "exact": "Families with exact prefixes only",
        "refused": "Families that are refused",
    }[found["families"][family]["kind"]]
    sections = DOCUMENTATION.read_text().split("\n## ")
    [section] = [one for one in sections if one.startswith(heading)]
    assert f"`{family}`" in section.replace("\n", " ")


def test_enough_families_blend(found: dict[str, Any]) -> None:
    assert found["families_blend"] >= MIN_BLEND
