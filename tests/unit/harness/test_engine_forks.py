"""A process that is no child is waited for, asked to end, and known to have ended."""

from __future__ import annotations

import subprocess

import pytest

from harness.engine_forks import Fork


def test_a_fork_is_running_until_it_is_told_to_end() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        fork = Fork(process.pid)
        assert fork.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            fork.wait(0.01)
        fork.terminate()
        assert fork.wait() == 0
        assert fork.poll() == 0
    fork.terminate()
