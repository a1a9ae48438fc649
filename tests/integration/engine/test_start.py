"""The start of an engine compares its memory with the real weights. With real vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.processes import Engine, Service, free_port, wait_for_engine
from ragcache_core.cost.engine_memory import INSUFFICIENT_MEMORY_EXIT_CODE
from ragcache_operator.status.component import WorkloadState, component_state

pytestmark = pytest.mark.timeout(600)

TINYRAG = Path(__file__).parents[3] / "models" / "tinyrag" / "model"
WEIGHTS_BYTES = 5_364_096
LEAST_BYTES = (2 << 30) + WEIGHTS_BYTES
"""What the engine below needs: 1 GiB of KV, its weights, and 1 GiB for vLLM."""


def command(port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "ragcache_engine.start", "--model", str(TINYRAG)),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "512"),
    ]


def environment(request_bytes: int, home: Path) -> dict[str, str]:
    return {
        "RAGCACHE_MEMORY_REQUEST_BYTES": str(request_bytes),
        "RAGCACHE_CACHESTORE": "127.0.0.1:9",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
        "VLLM_CACHE_ROOT": str(home),
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def test_an_engine_that_does_not_fit_ends_with_sizes_and_fix(tmp_path: Path) -> None:
    done = subprocess.run(
        command(free_port()),
        env={**os.environ, **environment(LEAST_BYTES - 1, tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == INSUFFICIENT_MEMORY_EXIT_CODE, done.stderr
    assert "vllm" not in done.stderr
    # The kubelet reports the end of the log, and the operator its last line.
    ended = {"exitCode": done.returncode, "reason": "Error", "message": done.stderr}
    container = {
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ended},
    }
    pod = {"metadata": {"name": "engine-0"}, "status": {"containerStatuses": [container]}}
    workloads = [WorkloadState("engine", wanted=1, ready=0, settled=False)]
    state = component_state("engine", workloads, [pod], exists=True, progress={}, waits={})
    assert state.reason == "InsufficientMemory"
    assert "the memory request of 2.00 GiB is too small: the weights take 5 MiB" in state.message
    assert state.message.endswith("raise memory and memoryLimit to 5Gi where they are set")
    assert "set spec.model.weights to 0.0625Gi" in state.message


@pytest.mark.slow
def test_an_engine_that_fits_becomes_vllms_server(tmp_path: Path) -> None:
    port = free_port()
    env = environment(LEAST_BYTES, tmp_path)
    service = Service("engine", command(port), env, tmp_path / "engine.log")
    try:
        wait_for_engine(Engine(service, f"http://127.0.0.1:{port}", None))
    finally:
        service.stop()
