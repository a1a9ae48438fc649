"""Fixtures that several parts share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from harness import availability, processes
from harness.browser import chromium_path
from harness.engine_forks import EngineForks
from harness.tiny_model import make_tiny_model

# Timing never decides a test: a busy machine is no counterexample. Nor does chance: every run tries
# the same examples. `--hypothesis-profile=other-examples` tries others.
_untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ragcache", _untimed, derandomize=True, database=None)
settings.register_profile("other-examples", _untimed, derandomize=False)
settings.load_profile("ragcache")


# Nor is it a store's silence, for the engines that tests start.
os.environ.setdefault("RAGCACHE_LOOKUP_DEADLINE_S", "60")
os.environ.setdefault("RAGCACHE_LOAD_DEADLINE_S", "60")

# A shell has what it runs behind `&` or `nohup` ignore these, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """Let no worker of xdist write the name of each test over its arguments.

    Helm's library would send the rest of a longer name as the manager of fields, which Kubernetes
    refuses.
    """
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            type(plugin).run_one_test.__globals__["setproctitle"] = lambda _: None


@pytest.fixture(scope="session", autouse=True)
def _engine_forks() -> Iterator[None]:
    """Let the tests' engines share the import of vLLM. Tests of a start use other ways to start."""
    processes.engine_forks = EngineForks()
    yield
    processes.engine_forks.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama with random weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of Chromium's command; skips without one, and fails where CI=true."""
    try:
        return chromium_path()
    except availability.Unavailable as unavailable:
        availability.skip(unavailable)
