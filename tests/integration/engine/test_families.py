"""Blending, saving and loading with several model families.

They differ in GQA, tied embeddings and the kind of rotation.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from harness.processes import COMPUTES_PLAIN, running_cachestore, running_engine
from ragcache_core.plan.prompt import Prompt, assemble, plan_exact
from ragcache_kv.model.folder import load_model_folder
from ragcache_wire.v1 import engine_pb2
from tests.integration.engine.families_inside import FAMILIES, make
from tests.integration.engine.test_vllm import ENGINE_ARGUMENTS, VOCABULARY, Platform
from tests.kit.engine import is_clear

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROUND_TRIPS = ("mistral", "qwen 2, yarn")
MAX_TOKENS = 4

ROUNDING = 0.01
"""bfloat16 has about three decimal digits."""

REFUSED = "mistral, sliding window"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The output of ``families_inside``, by family."""
    folder = tmp_path_factory.mktemp("families")
    argv = [sys.executable, "-m", "tests.integration.engine.families_inside", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != REFUSED])
def test_keys_of_a_family_are_rotated_and_prompts_recomputed(
    found: dict[str, dict[str, Any]], family: str
) -> None:
    result = found[family]
    assert "refused" not in result
    assert result["whole_equals_prefill"]
    assert result["values_equal"]
    assert result["moved_error"] < ROUNDING
    assert result["unmoved_error"] > 10 * ROUNDING


def test_a_sliding_window_is_refused_with_a_reason(found: dict[str, dict[str, Any]]) -> None:
    assert "sliding_window = 64" in found[REFUSED]["refused"]


@pytest.mark.parametrize("family", ROUND_TRIPS)
def test_values_of_a_family_are_saved_and_loaded_with_the_same_answer(
    tmp_path: Path, family: str
) -> None:
    model = tmp_path / "model"
    make(model, FAMILIES[family])
    space = load_model_folder(str(model)).space("auto")
    with (
        running_cachestore(tmp_path / "store") as store,
        running_engine(
            tmp_path, model, store.address, *ENGINE_ARGUMENTS, settings=COMPUTES_PLAIN
        ) as engine,
    ):
        platform = Platform(tmp_path, model, store, engine, space)

        def ask(prompt: Prompt) -> tuple[tuple[int, ...], engine_pb2.RequestRecord]:
            """Ask under a unique salt, which bypasses vLLM's own prefix cache."""
            request = uuid.uuid4().hex
            plan = plan_exact(prompt, space, "public", request)
            answer = platform.complete(prompt, plan, MAX_TOKENS, cache_salt=request)
            return answer.token_ids, platform.record(request)

        for prompt in clear_prompts(engine.url):
            expected = platform.compute(prompt, MAX_TOKENS).token_ids
            answer, record = ask(prompt)
            assert (answer, record.loaded_tokens) == (expected, 0)
            platform.wait_until_stored(prompt)
            answer, record = ask(prompt)
            whole = prompt.chunk_ends[-1]
            assert (record.local_tokens, record.loaded_tokens, record.miss) == (0, whole, "")
            assert answer == expected


def clear_prompts(url: str) -> list[Prompt]:
    """Return prompts whose answers do not depend on rounding."""
    prompts: list[Prompt] = []
    for seed in itertools.count():
        rng = random.Random(f"family {seed}")
        ids = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (41, 131, 77, 23)]
        prompt = assemble(ids[0], ids[1:3], ids[3])
        if is_clear(url, prompt, MAX_TOKENS):
            prompts.append(prompt)
        if len(prompts) == 3:
            return prompts
    raise AssertionError("seeds have no end")
