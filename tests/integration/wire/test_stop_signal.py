"""A stop while a service starts, for the first process of a container."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

NEW_PIDS = ("unshare", "--pid", "--fork", "--kill-child")

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="needs root and unshare, to start a process as the first one of a PID namespace",
)

STARTING = """
import importlib, os, sys, time

def read_slowly():
    print(os.getpid(), flush=True)
    time.sleep(600)

module, settings = sys.argv[1:]
service = importlib.import_module(f"{module}.__main__")
setattr(service, settings, read_slowly)
sys.argv[1:] = []
service.main()
"""


@needs_root
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("module", "settings"),
    [
        ("ragcache_gateway", "GatewaySettings"),
        ("ragcache_retriever", "RetrieverSettings"),
        ("ragcache_cachestore", "CacheStoreSettings"),
    ],
)
def test_a_service_that_starts_as_the_first_process_ends_at_a_stop(
    module: str, settings: str
) -> None:
    command = [*NEW_PIDS, sys.executable, "-c", STARTING, module, settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            assert parent.stdout.readline() == "1\n"
            children = f"/proc/{parent.pid}/task/{parent.pid}/children"
            with open(children, encoding="ascii") as file:
                os.kill(int(file.read()), signal.SIGTERM)
            assert parent.wait(60) == 128 + signal.SIGTERM
        finally:
            parent.kill()
