"""The health of a real vLLM whose worker hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from harness.completion import complete
from harness.processes import running_engine
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(300)

HANG_S = 2.0
MIDDLEWARE = "ragcache_engine.telemetry.health.HealthMiddleware"
WAIT_S = 60.0


def worker_of(server: int) -> int:
    """Return the worker process below vLLM's server."""
    parents, names = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # processes of other tests end meanwhile
            pid, _, rest = stat.read_text().partition(" (")
            names[int(pid)], _, fields = rest.rpartition(") ")
            parents[int(pid)] = int(fields.split()[1])

    def is_below(pid: int) -> bool:
        while pid in parents and pid != server:
            pid = parents[pid]
        return pid == server

    (found,) = [
        pid for pid, name in names.items() if name.startswith("VLLM::Wor") and is_below(pid)
    ]
    return found


@pytest.mark.slow
def test_health_fails_while_no_step_ends(tiny_model: Path, tmp_path: Path) -> None:
    with running_engine(
        *(
            tmp_path,
            tiny_model,
            None,
            "--middleware",
            "ragcache_engine.telemetry.health.HealthMiddleware",
        ),
        settings={"RAGCACHE_HANG_S": str(HANG_S)},
    ) as engine:

        def health() -> int:
            return httpx.get(f"{engine.url}/health", timeout=60).status_code

        def ask() -> None:
            tokens.append(len(complete(engine.url, [7] * 40, max_tokens=5).token_ids))

        tokens: list[int] = []
        ask()
        time.sleep(HANG_S + 1)
        assert health() == 200, "the engine is idle"
        processor = httpx.get(f"{engine.url}/ragcache/processor", timeout=60).json()
        assert processor["number_type"] == "bfloat16", "as vLLM has resolved it"
        worker = worker_of(engine.service.pid)
        os.kill(worker, signal.SIGSTOP)
        try:
            asking = threading.Thread(target=ask)
            asking.start()
            wait_until(lambda: health() == 503)
            assert httpx.get(f"{engine.url}/v1/models", timeout=60).status_code == 200
        finally:
            os.kill(worker, signal.SIGCONT)
        wait_until(lambda: health() == 200)
        asking.join(WAIT_S)
        assert tokens == [5, 5]
    assert "the engine hangs" in engine.service.log.read_text()
