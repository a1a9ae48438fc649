"""The environment in which vLLM runs its model runner V2 on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

INTERPRETER = Path(__file__).resolve().parent / "interpreter"


def v2_settings(*, asynchronous: bool) -> dict[str, str]:
    """Return the environment of an engine. asynchronous: whether two steps may be in flight."""
    others = filter(None, [os.environ.get("PYTHONPATH")])
    return {
        "PYTHONPATH": os.pathsep.join([str(INTERPRETER), *others]),
        "RAGCACHE_TEST_ASYNC": "1" if asynchronous else "0",
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
