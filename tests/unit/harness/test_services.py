"""Services that benchmarks and tests start."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from harness.processes import Service
from tests.kit.wait import wait_until

LIMIT_S = 60.0
STARTS_ONE = f"""
import signal
from pathlib import Path
from {Service.__module__} import Service

service = Service("sleeper", ["sleep", "600"], {{}}, Path("log"))
try:
    print(service.pid, flush=True)
    signal.pause()
finally:
    service.stop()
"""


def test_a_signal_to_end_ends_the_services_too(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command = [sys.executable, "-c", STARTS_ONE]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as starter:
        assert starter.stdout is not None
        service = psutil.Process(int(starter.stdout.readline()))
        starter.send_signal(signal.SIGTERM)
        assert starter.wait(LIMIT_S) != 0

    def has_ended() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends between the two questions
            return not service.is_running() or service.status() == psutil.STATUS_ZOMBIE
        return True

    wait_until(has_ended)
