"""Services that benchmarks and tests start."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from harness.processes import Service

LIMIT_S = 60.0
STARTS_ONE = f"""
import sys, time
from pathlib import Path
from {Service.__module__} import Service

service = Service("sleeper", ["sleep", "600"], {{}}, Path("log"))
try:
    print(service.pid, flush=True)
    time.sleep(600)
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
    deadline = time.monotonic() + LIMIT_S
    with contextlib.suppress(psutil.NoSuchProcess):  # it ends between the two questions
        while service.is_running() and service.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "it is still there"
            time.sleep(0.01)
